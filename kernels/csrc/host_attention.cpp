// The C interface of attention to given ids; chooses the instruction set.
#include "job.h"
#include "processor.h"

const Kernel *find_kernel(int32_t path) {
    switch (path) {
    case HFK_PORTABLE:
        return &portable_kernel;
#ifdef HFK_X86
    case HFK_AVX2:
        return Processor::instance().avx2 ? &avx2_kernel : nullptr;
    case HFK_AVX512:
        return Processor::instance().avx512 ? &avx512_kernel : nullptr;
#endif
#ifdef HFK_X86_BF16
    case HFK_AVX512_BF16:
        return Processor::instance().avx512_bf16 ? &avx512_bf16_kernel : nullptr;
#endif
#ifdef HFK_AARCH64
    case HFK_NEON:
        return &neon_kernel;
#endif
    case HFK_AUTO:
        for (int32_t best : {HFK_AVX512_BF16, HFK_AVX512, HFK_AVX2, HFK_NEON}) {
            if (const Kernel *kernel = find_kernel(best)) return kernel;
        }
        return &portable_kernel;
    default:
        return nullptr;
    }
}

namespace {

// Whether coded rows have the bytes that their dims need. Mapped files have rows of numbers.
bool fits_coding(const hfk_request &request) {
    const hfk_coding &coding = *request.coding;
    const int64_t key_bytes = request.key_dim * coding.bits / 8;
    const int64_t value_bytes = request.value_dim * coding.bits / 8;
    const bool in_key = request.value_start == 0;
    return is_good(coding, request.key_dim) && is_good(coding, request.value_dim) &&
           (in_key ? request.value_dim <= request.key_dim : request.value_start == key_bytes) &&
           request.row_dim == key_bytes + (in_key ? 0 : value_bytes) && !request.in_files;
}

} // namespace

bool is_good(const hfk_request &request) {
    const auto divides = [](int64_t number, int64_t multiple) {
        return number > 0 && multiple % number == 0;
    };
    // Ids and page numbers are compared as unsigned numbers of 32 bits.
    constexpr int64_t kMost = int64_t{1} << 31;
    return request.dtype >= HFK_FLOAT32 && request.dtype <= HFK_BFLOAT16 && request.batch >= 0 &&
           request.queries >= 0 && request.count >= 0 && request.key_dim > 0 &&
           request.value_dim > 0 && request.page_len > 0 && request.max_pages >= 0 &&
           request.page_count >= 0 && request.page_count <= kMost && request.tokens >= 0 &&
           request.tokens <= std::min(kMost, request.max_pages * request.page_len) &&
           request.value_start >= 0 &&
           (request.coding != nullptr
                ? fits_coding(request)
                : request.row_dim >=
                      std::max(request.key_dim, request.value_start + request.value_dim)) &&
           divides(request.kv_heads, request.id_heads) &&
           divides(request.id_heads, request.query_heads);
}

static int32_t serve(const hfk_request &request, bool attends) {
    return serve(is_good(request), request.path, [&](const Kernel &kernel) {
        return Job(request, kernel, attends).run();
    });
}

int32_t hfk_version(void) { return HFK_VERSION; }

const char *hfk_sources(void) { return HFK_SOURCES; }

int32_t hfk_has_path(int32_t path) { return find_kernel(path) != nullptr; }

int32_t hfk_attend(const hfk_request *request) { return serve(*request, true); }

int32_t hfk_scores(const hfk_request *request) { return serve(*request, false); }

int32_t hfk_exp(int32_t path, const float *in, float *out, int64_t count) {
    const Kernel *kernel = find_kernel(path);
    if (kernel == nullptr) return HFK_NO_PATH;
    kernel->exp(in, out, count);
    return HFK_OK;
}
