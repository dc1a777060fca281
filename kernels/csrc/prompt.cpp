// Attention of many queries over rows that lie side by side, on several threads.
#include "job.h"
#include "processor.h"

namespace {

// A tile has so many rows of queries. Fewer would read the same keys more often, and more would not
// fit into the second-level cache.
constexpr int64_t kMostRows = 256, kLeastRows = 48;
constexpr int64_t kLine = 16; // floats of a cache line

class PromptJob {
  public:
    PromptJob(const hfk_prompt &request, const Kernel &kernel)
        : request_(request), kernel_(kernel), threads_(std::clamp(request.threads, 1, kMostThreads)) {
        const int64_t heads = request.query_heads / request.kv_heads;
        const int64_t groups = request.batch * request.kv_heads;
        const int64_t fair = request.queries * groups / (kItemsPerThread * threads_) + 1;
        const int64_t least = std::max<int64_t>(1, kLeastRows / heads);
        const int64_t most = std::max<int64_t>(1, kMostRows / heads);
        const int64_t whole = (fair + least - 1) / least * least;
        step_ = std::min(std::clamp(whole, std::min(least, most), most), request.queries);
        tiles_ = step_ == 0 ? 0 : (request.queries + step_ - 1) / step_;
    }

    void run() {
        const int64_t items = request_.batch * request_.kv_heads * tiles_;
        if (items == 0) return;
        // Each slot begins at a cache line: vectors that straddle two take longer.
        const int64_t floats = kernel_.scratch_floats(shape_of_prompt(request_, step_));
        floats_ = (floats + kLine - 1) / kLine * kLine;
        scratch_.resize(floats_ * threads_ + kLine);
        const auto address = reinterpret_cast<uintptr_t>(scratch_.data()) / sizeof(float);
        first_ = scratch_.data() + (kLine - address % kLine) % kLine;
        Pool::instance().run(items, threads_, *this);
    }

    void work(int64_t item, int slot) {
        const int64_t groups = request_.batch * request_.kv_heads;
        // The last queries see most keys: they come first.
        const int64_t first = (tiles_ - 1 - item / groups) * step_, group = item % groups;
        kernel_.prompt(PromptTile{&request_, group / request_.kv_heads, group % request_.kv_heads,
                                  first, std::min(first + step_, request_.queries),
                                  first_ + slot * floats_});
    }

  private:
    const hfk_prompt &request_;
    const Kernel &kernel_;
    const int threads_;
    int64_t step_ = 0, tiles_ = 0, floats_ = 0;
    std::vector<float> scratch_;
    float *first_ = nullptr;
};

bool is_good(const hfk_prompt &request) {
    return request.dtype >= HFK_FLOAT32 && request.dtype <= HFK_BFLOAT16 && request.batch >= 0 &&
           request.queries >= 0 && request.tokens >= 0 && request.key_dim > 0 &&
           request.value_dim > 0 && request.kv_heads > 0 && request.query_heads > 0 &&
           request.query_heads % request.kv_heads == 0 &&
           (request.block_len == 0 || request.block_len == 16 || request.block_len == 32 ||
            request.block_len == 64 || request.block_len == 128);
}

// Prompts multiply bf16 in fp32 where that is faster.
int32_t path_of(const hfk_prompt &request) {
#ifdef HFK_X86_BF16
    const bool chooses = request.path == HFK_AUTO && request.dtype == HFK_BFLOAT16;
    if (chooses && Processor::instance().avx512 && !Processor::instance().fast_pairs) {
        return HFK_AVX512;
    }
#endif
    return request.path;
}

} // namespace

int32_t hfk_prompt_attention(const hfk_prompt *request) {
    return serve(is_good(*request), path_of(*request), [request](const Kernel &kernel) {
        PromptJob(*request, kernel).run();
        return HFK_OK;
    });
}
