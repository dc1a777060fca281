// The C interface of whole decode steps.
#include <cstdlib>
#include <cstring>
#include <new>

#include "job.h"
#include "numbers.h"
#include "rest.h"
#include "search.h"

namespace {

// Memory of a thread, kept from call to call: fresh pages cost more than what is done in them.
class Arena {
  public:
    ~Arena() { std::free(data_); }

    // At least `bytes`, from a multiple of 64 on; what was there before is lost. Throws bad_alloc.
    char *take(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            const int64_t rounded = (bytes + bytes / 4 + kAlign - 1) / kAlign * kAlign;
            data_ = static_cast<char *>(std::aligned_alloc(kAlign, rounded));
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = rounded;
        }
        return data_;
    }

  private:
    static constexpr int64_t kAlign = 64;

    char *data_ = nullptr;
    int64_t size_ = 0;
};

thread_local Arena arena;

class Step {
  public:
    Step(const hfk_step &step, const Kernel &kernel, const Search *search)
        : step_(step), request_(step.attention), kernel_(kernel), search_(search),
          spans_(request_.batch * request_.id_heads * request_.queries),
          threads_(std::clamp(request_.threads, 1, kMostThreads)),
          work_bytes_(std::max(search == nullptr ? 0 : search->bytes(),
                               Rest(step, kernel).bytes())),
          scratch_bytes_((kernel.scratch_floats(request_) * 4 + 63) / 64 * 64) {}

    int32_t run() {
        if (spans_ == 0) return HFK_OK;
        rows_ = request_.batch * request_.query_heads * request_.queries;
        lse_.resize(rows_);
        if (step_.result != nullptr) {
            out_.resize(rows_ * request_.value_dim);
            request_.out = out_.data();
        }
        // Whole selections keep what they read in a processor's cache. Few of them are shared out.
        if (threads_ == 1 || spans_ >= 2 * threads_) {
            misses_rows_ = misses_rows(request_);
            Pool::instance().run(spans_, threads_, &Step::whole, this);
        } else {
            run_in_chunks();
        }
        if (no_memory_) return HFK_NO_MEMORY;
        if (!all_found_) return HFK_BAD_ID;
        finish();
        return HFK_OK;
    }

    // The search alone.
    int32_t find(const hfk_paris_trace *trace) {
        for (int64_t index = 0; index < spans_; ++index) {
            char *work = arena.take(work_bytes_ + scratch_bytes_);
            if (!search_all(index, work)) return HFK_BAD_ID;
            if (trace != nullptr) trace_paris(*search_, selection(index), work, *trace);
        }
        return HFK_OK;
    }

  private:
    static void whole(void *step, int64_t index, int) {
        Step &self = *static_cast<Step *>(step);
        char *work;
        try {
            work = arena.take(self.work_bytes_ + self.scratch_bytes_);
        } catch (const std::bad_alloc &) {
            self.no_memory_.store(true, std::memory_order_relaxed);
            return;
        }
        if (self.search_ != nullptr && !self.search_all(index, work)) {
            self.note_astray();
            return;
        }
        self.attend(index, reinterpret_cast<float *>(work + self.work_bytes_));
        self.add_rest(index, work);
    }

    static void rest_item(void *step, int64_t index, int) {
        Step &self = *static_cast<Step *>(step);
        self.add_rest(index, self.work_ + index * self.work_bytes_);
    }

    void add_rest(int64_t index, char *work) {
        if (step_.rest == nullptr) return;
        const int64_t row = first_row(selection(index));
        Rest(step_, kernel_).add(selection(index), ids(index), work,
                                 request_.out + row * request_.value_dim, lse_.data() + row);
    }

    // False as of `Search::run`, and then without ids.
    bool search_all(int64_t index, char *work) const {
        float *scratch = reinterpret_cast<float *>(work + work_bytes_);
        for (int stage = 0; stage < search_->stages(); ++stage) {
            if (!search_->run(stage, selection(index), work, scratch, 0, 1, ids(index))) {
                return false;
            }
        }
        return true;
    }

    void note_astray() { all_found_.store(false, std::memory_order_relaxed); }

    void attend(int64_t index, float *scratch) {
        const Selection own = selection(index);
        const Span span = {own.batch,      own.head, own.query, ids(index), 0,
                           request_.count, 0,        step_.window.length};
        if (misses_rows_) ask_for_rows(request_, span);
        const int64_t row = first_row(own);
        const bool found = kernel_.attend(
            request_, window(), span, scratch, request_.out + row * request_.value_dim,
            request_.queries * request_.value_dim, lse_.data() + row, request_.queries);
        if (!found) note_astray();
    }

    // Stage by stage, each cut into chunks.
    void run_in_chunks() {
        if (work_bytes_ > 0) work_ = arena.take(spans_ * work_bytes_ + threads_ * scratch_bytes_);
        if (search_ != nullptr) {
            for (stage_ = 0; stage_ < search_->stages(); ++stage_) {
                chunks_ = search_->is_split(stage_)
                              ? (kItemsPerThread * threads_ + spans_ - 1) / spans_ : 1;
                Pool::instance().run(spans_ * chunks_, threads_, &Step::chunk, this);
                if (!all_found_) return;
            }
        }
        hfk_request request = request_;
        request.lse = lse_.data();
        if (Job(request, kernel_, true, window()).run() == HFK_BAD_ID) note_astray();
        if (step_.rest != nullptr) Pool::instance().run(spans_, threads_, &Step::rest_item, this);
    }

    static void chunk(void *step, int64_t item, int slot) {
        Step &self = *static_cast<Step *>(step);
        const int64_t index = item / self.chunks_;
        char *scratch = self.work_ + self.spans_ * self.work_bytes_ + slot * self.scratch_bytes_;
        const bool found = self.search_->run(
            self.stage_, self.selection(index), self.work_ + index * self.work_bytes_,
            reinterpret_cast<float *>(scratch), item % self.chunks_, self.chunks_, self.ids(index));
        if (!found) self.note_astray();
    }

    // Learned sinks, the result's dtype, and what is counted.
    void finish() {
        if (step_.sink_logits != nullptr) {
            for (int64_t row = 0; row < rows_; ++row) {
                const int64_t head = row / request_.queries % request_.query_heads;
                // The share of the softmax that is left: 1 / (1 + exp(sink - lse)).
                const float sink = step_.sink_logits[head];
                if (sink == -std::numeric_limits<float>::infinity()) continue;
                const float share = 1.0f / (1.0f + std::exp(sink - lse_[row]));
                float *out = request_.out + row * request_.value_dim;
                for (int64_t d = 0; d < request_.value_dim; ++d) out[d] *= share;
            }
        }
        if (step_.result != nullptr) {
            write_numbers(request_.out, request_.dtype, step_.result, rows_ * request_.value_dim);
        }
        if (step_.selected != nullptr) {
            const int64_t places = spans_ * request_.count;
            int64_t chosen = 0;
            for (int64_t i = 0; i < places; ++i) chosen += request_.ids[i] >= 0;
            *step_.selected += chosen;
        }
        if (request_.lse != nullptr) std::copy(lse_.begin(), lse_.end(), request_.lse);
    }

    // Returns the row of a selection's first query head in `out` and `lse`.
    int64_t first_row(const Selection &own) const {
        const int64_t heads = request_.query_heads / request_.id_heads;
        return (own.batch * request_.query_heads + own.head * heads) * request_.queries + own.query;
    }

    Selection selection(int64_t index) const {
        const int64_t rest = index / request_.queries;
        return {rest / request_.id_heads, rest % request_.id_heads, index % request_.queries};
    }

    // The step says that a search may write them.
    int32_t *ids(int64_t index) const {
        return const_cast<int32_t *>(request_.ids) + index * request_.count;
    }

    const hfk_window *window() const { return step_.window.length > 0 ? &step_.window : nullptr; }

    const hfk_step &step_;
    hfk_request request_;
    const Kernel &kernel_;
    const Search *const search_;
    const int64_t spans_;
    const int32_t threads_;
    const int64_t work_bytes_, scratch_bytes_;
    int64_t rows_ = 0;
    bool misses_rows_ = false;
    std::vector<float> lse_, out_;
    // These are of work in chunks.
    char *work_ = nullptr;
    int stage_ = 0;
    int64_t chunks_ = 1;
    std::atomic<bool> all_found_{true}, no_memory_{false};
};

bool is_good(const hfk_step &step) {
    const hfk_window &window = step.window;
    return is_good(step.attention) && step.tokens >= 0 && window.length <= window.capacity &&
           window.value_row >= step.attention.value_dim &&
           (window.length == 0 ? step.new_key == nullptr
                               : window.length >= step.attention.queries);
}

// Writes `token [batch, kv_heads, dim]` behind the others of `rows`, `row` numbers from one to the
// next.
void write_newest(const hfk_step &step, const void *token, const void *rows, int64_t dim,
                  int64_t row) {
    if (token == nullptr) return;
    const hfk_window &window = step.window;
    const int64_t number = step.attention.dtype == HFK_FLOAT32 ? 4 : 2;
    const char *from = static_cast<const char *>(token);
    char *to = static_cast<char *>(const_cast<void *>(rows)) + (window.length - 1) * row * number;
    const int64_t heads = step.attention.batch * step.attention.kv_heads;
    for (int64_t head = 0; head < heads; ++head) {
        std::memcpy(to + head * window.capacity * row * number, from + head * dim * number,
                    dim * number);
    }
}

int32_t serve(const hfk_step &step, bool attends, const hfk_paris_trace *trace) {
    if (!is_good(step)) return HFK_BAD_REQUEST;
    const Kernel *kernel = find_kernel(step.attention.path);
    if (kernel == nullptr) return HFK_NO_PATH;
    try {
        std::unique_ptr<Search> search;
        if (step.search_kind != HFK_SEARCH_NONE) {
            search = make_search(step, *kernel);
            if (search == nullptr) return HFK_BAD_REQUEST;
        }
        Step job(step, *kernel, search.get());
        if (attends) {
            const hfk_request &request = step.attention;
            write_newest(step, step.new_key, step.window.keys, request.key_dim, request.key_dim);
            write_newest(step, step.new_value, step.window.values, request.value_dim,
                         step.window.value_row);
            return job.run();
        }
        if (search == nullptr || (trace != nullptr && step.search_kind != HFK_SEARCH_PARIS)) {
            return HFK_BAD_REQUEST;
        }
        return job.find(trace);
    } catch (const std::bad_alloc &) {
        return HFK_NO_MEMORY;
    }
}

} // namespace

int32_t hfk_run_step(const struct hfk_step *step) { return serve(*step, true, nullptr); }

int32_t hfk_search_ids(const struct hfk_step *step, const struct hfk_paris_trace *trace) {
    return serve(*step, false, trace);
}
