// ParisKV's codes of keys, on all threads.
#include "job.h"
#include "paris_encode_kernel.h"

void encode_portable(const hfk_paris_encoding &request, int64_t batch, int64_t head, int64_t first,
                     int64_t last) {
    encode_keys(request, batch, head, first, last);
}

namespace {

constexpr int64_t kKeys = 256; // of an item of work

struct Encoding {
    const hfk_paris_encoding &request;
    EncodeKeys encode;
    int64_t parts;

    void work(int64_t item, int) const {
        const int64_t group = item / parts, first = item % parts * kKeys;
        encode(request, group / request.heads, group % request.heads, first,
               std::min(first + kKeys, request.tokens));
    }
};

bool is_good(const hfk_paris_encoding &request) {
    return request.batch >= 0 && request.heads >= 0 && request.tokens >= 0 &&
           request.dim >= 8 && request.dim <= kLongest && request.dim % 8 == 0 &&
           request.head_dim >= 1 && request.head_dim <= request.dim && request.stride >= 1 &&
           request.dtype >= HFK_FLOAT32 && request.dtype <= HFK_BFLOAT16;
}

} // namespace

int32_t hfk_paris_encode(const hfk_paris_encoding *request) {
    return serve(is_good(*request), request->path, [request](const Kernel &kernel) {
        EncodeKeys encode = encode_portable;
#ifdef HFK_X86
        // All others have AVX2.
        if (&kernel != &portable_kernel) encode = encode_avx2;
#endif
        Encoding all{*request, encode, (request->tokens + kKeys - 1) / kKeys};
        Pool::instance().run(request->batch * request->heads * all.parts,
                             std::clamp(request->threads, 1, kMostThreads), all);
        return HFK_OK;
    });
}
