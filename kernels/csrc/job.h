// Attention to given ids, or their scores, on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "files.h"
#include "kernel.h"
#include "pool.h"

// Whether sizes and dtype of a request are what they must be.
bool is_good(const hfk_request &request);

// Whether rows of `width` numbers can be coded so.
bool is_good(const hfk_coding &coding, int64_t width);

namespace {

// A chunk of a span takes at least this many ids, so that merging costs little beside it.
constexpr int64_t kLeastChunk = 256;
// Chunks begin at multiples of this.
constexpr int64_t kChunkStep = 16;
// Items for each thread: threads that are late, or share a core, leave theirs to others.
constexpr int64_t kItemsPerThread = 4;
constexpr int32_t kMostThreads = 1024;

// The status of a request, which `answer(kernel)` gives where the request is good.
template <class Answer> int32_t serve(bool is_good, int32_t path, const Answer &answer) {
    if (!is_good) return HFK_BAD_REQUEST;
    const Kernel *kernel = find_kernel(path);
    if (kernel == nullptr) return HFK_NO_PATH;
    try {
        return answer(*kernel);
    } catch (const std::bad_alloc &) {
        return HFK_NO_MEMORY;
    }
}

// One request, split into selections and these into chunks of their ids.
class Job {
  public:
    // `window`: rows that are attended to beside the ids; null for none.
    Job(const hfk_request &request, const Kernel &kernel, bool attends,
        const hfk_window *window = nullptr)
        : request_(request), kernel_(kernel), attends_(attends), window_(window),
          heads_(request.query_heads / request.id_heads),
          spans_(request.batch * request.id_heads * request.queries) {
        threads_ = std::clamp(request.threads, 1, kMostThreads);
        if (threads_ > 1 && spans_ > 0 && spans_ < kItemsPerThread * threads_) {
            const int64_t wanted = (kItemsPerThread * threads_ + spans_ - 1) / spans_;
            const int64_t rows = request.count + near_length();
            chunks_ = std::clamp<int64_t>(rows / kLeastChunk, 1, wanted);
        }
    }

    int32_t run() {
        const int64_t items = spans_ * chunks_;
        if (items == 0) return HFK_OK;
        // A gap of a cache line keeps the slots of two threads apart.
        scratch_floats_ = kernel_.scratch_floats(request_) + 16;
        scratch_.resize(scratch_floats_ * threads_);
        if (attends_ && chunks_ > 1) {
            part_out_.resize(items * heads_ * request_.value_dim);
            part_lse_.resize(items * heads_);
        }
        misses_rows_ = misses_rows(request_);
        Pool::instance().run(items, threads_, *this);
        if (!whole_) return HFK_BAD_ID;
        if (attends_ && chunks_ > 1) {
            for (int64_t span = 0; span < spans_; ++span) merge(span);
        }
        return HFK_OK;
    }

    void work(int64_t item, int slot) {
        const Span span = locate(item);
        float *scratch = scratch_.data() + slot * scratch_floats_;
        const int64_t row = first_row(span);
        if (misses_rows_) ask_for_rows(request_, span);
        bool whole;
        if (!attends_) {
            whole = kernel_.score(request_, span, scratch, request_.out + row * request_.count,
                                  request_.queries * request_.count);
        } else if (chunks_ == 1) {
            whole = kernel_.attend(request_, window_, span, scratch, request_.out + row * request_.value_dim,
                                   request_.queries * request_.value_dim, request_.lse + row,
                                   request_.queries);
        } else {
            const int64_t part = item * heads_;
            whole = kernel_.attend(request_, window_, span, scratch,
                                   part_out_.data() + part * request_.value_dim,
                                   request_.value_dim, part_lse_.data() + part, 1);
        }
        if (!whole) whole_.store(false, std::memory_order_relaxed);
    }

  private:
    Span locate(int64_t item) const {
        const int64_t chunk = item % chunks_;
        int64_t rest = item / chunks_;
        Span span{};
        span.query = rest % request_.queries;
        rest /= request_.queries;
        span.id_head = rest % request_.id_heads;
        span.batch = rest / request_.id_heads;
        span.ids = request_.ids + item / chunks_ * request_.count;
        span.first = boundary(request_.count, chunk);
        span.last = boundary(request_.count, chunk + 1);
        span.near_first = boundary(near_length(), chunk);
        span.near_last = boundary(near_length(), chunk + 1);
        return span;
    }

    int64_t near_length() const { return window_ == nullptr ? 0 : window_->length; }

    int64_t boundary(int64_t count, int64_t chunk) const {
        if (chunk == chunks_) return count;
        return count * chunk / chunks_ / kChunkStep * kChunkStep;
    }

    // The row of `out` and `lse` of the span's first query head; the next head's is `queries` on.
    int64_t first_row(const Span &span) const {
        const int64_t head = span.batch * request_.query_heads + span.id_head * heads_;
        return head * request_.queries + span.query;
    }

    void merge(int64_t index) {
        const int64_t first = index * chunks_;
        const int64_t row = first_row(locate(first));
        const int64_t dim = request_.value_dim;
        for (int64_t g = 0; g < heads_; ++g) {
            float *out = request_.out + (row + g * request_.queries) * dim;
            float &lse = request_.lse[row + g * request_.queries];
            std::fill(out, out + dim, 0.0f);
            float largest = -std::numeric_limits<float>::infinity();
            for (int64_t p = 0; p < chunks_; ++p) {
                largest = std::max(largest, part_lse_[(first + p) * heads_ + g]);
            }
            double total = 0.0;
            for (int64_t p = 0; p < chunks_; ++p) {
                const int64_t part = (first + p) * heads_ + g;
                // NaN is not equal to -inf, so it is merged and shows.
                if (part_lse_[part] == -std::numeric_limits<float>::infinity()) continue;
                const double weight = std::exp(static_cast<double>(part_lse_[part]) - largest);
                total += weight;
                const float *values = part_out_.data() + part * dim;
                for (int64_t d = 0; d < dim; ++d) out[d] += static_cast<float>(weight) * values[d];
            }
            lse = largest + static_cast<float>(std::log(total));
            if (total == 0.0) continue;
            const float factor = static_cast<float>(1.0 / total);
            for (int64_t d = 0; d < dim; ++d) out[d] *= factor;
        }
    }

    const hfk_request &request_;
    const Kernel &kernel_;
    const bool attends_;
    const hfk_window *const window_;
    const int64_t heads_, spans_;
    int32_t threads_;
    int64_t chunks_ = 1;
    int64_t scratch_floats_ = 0;
    bool misses_rows_ = false;
    std::vector<float> scratch_, part_out_, part_lse_;
    // False once an id led to no row.
    std::atomic<bool> whole_{true};
};

} // namespace
