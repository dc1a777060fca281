// Attention of many query heads to rows that they share: an exact pass of some drafts, or heads that
// have one KV head. See rows.h on linkage, and panels.h on how queries lie.
//
// Some rows are converted at a time, as many as stay in the first-level cache while all panels are
// multiplied with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "codes.h"
#include "panels.h"

namespace {

// From so many heads on, products of panels are quicker than those of single heads.
constexpr int64_t kManyHeads = 12;
// Keys that are converted at once: a multiple of any panel's rows.
constexpr int kKeyRows = 8;
// Columns of values that are converted at once: a cache line of halves.
constexpr int64_t kColumns = 32;

inline bool goes_in_panels(const hfk_request &request) {
    return request.coding == nullptr && request.query_heads >= kManyHeads * request.id_heads;
}

// Floats that ManyHeads works in.
inline int64_t many_heads_floats(const hfk_request &request) {
    const int64_t heads = padded(request.query_heads / request.id_heads);
    const int64_t key_dim = padded(request.key_dim), value_dim = padded(request.value_dim);
    return heads * (key_dim + value_dim + kBlock + 2) +
           std::max(kKeyRows * (key_dim + kPad), kBlock * kColumns);
}

template <class I, class T> class ManyHeads {
    typedef typename I::V V;
    // Numbers are multiplied in this type. In bf16 the weights of values are rounded to it.
    typedef std::conditional_t<I::template multiplies<T>, T, float> M;
    typedef Panel<I, M, 1> P;
    static constexpr int64_t kInSlot = P::kInSlot;

  public:
    ManyHeads(const hfk_request &request, const Span &span, float *scratch)
        : request_(request), heads_(request.query_heads / request.id_heads),
          lanes_((heads_ + I::lanes - 1) / I::lanes * I::lanes),
          key_slots_((request.key_dim + kInSlot - 1) / kInSlot),
          key_row_(padded(request.key_dim) + kPad), value_dim_(padded(request.value_dim)),
          query_(scratch), out_(query_ + lanes_ * key_slots_), scores_(out_ + lanes_ * value_dim_),
          top_(scores_ + lanes_ * kBlock), sum_(top_ + lanes_), strip_(sum_ + lanes_) {
        std::fill(query_, out_, 0.0f);
        std::fill(out_, scores_, 0.0f);
        std::fill(top_, sum_, -__builtin_inff());
        std::fill(sum_, strip_, 0.0f);
        const int64_t head = span.batch * request.query_heads + span.id_head * heads_;
        const T *given = static_cast<const T *>(request.query) +
                         (head * request.queries + span.query) * request.key_dim;
        for_panels([&](auto panel, int64_t first) {
            constexpr int64_t kQueries = decltype(panel)::kQueries;
            for (int64_t g = first; g < std::min(first + kQueries, heads_); ++g) {
                P::put_row(given + g * request_.queries * request_.key_dim, request_.key_dim, strip_);
                float *column = query_ + first * key_slots_ + g - first;
                for (int64_t d = 0; d < key_slots_; ++d) column[d * kQueries] = strip_[d];
            }
        });
    }

    template <class Stream> void absorb(Stream &stream) {
        Block block;
        for (stream.take(block); block.count > 0; stream.take(block)) {
            score(block);
            for_panels([&](auto panel, int64_t first) {
                float *scores = scores_ + first * kBlock;
                panel.update_softmax(scores, block.count, top_ + first, sum_ + first,
                                     out_ + first * value_dim_, value_dim_);
                if constexpr (kInSlot != 1) panel.pair_weights(scores, block.count);
            });
            for (int64_t d = 0; d < value_dim_; d += kColumns) add_values(block, d);
        }
    }

    // Scores go to out + head * out_stride, at the places of their rows.
    template <class Stream> void write_scores(Stream &stream, float *out, int64_t out_stride) {
        Block block;
        for (stream.take(block); block.count > 0; stream.take(block)) {
            score(block);
            for_panels([&](auto panel, int64_t first) {
                constexpr int64_t kQueries = decltype(panel)::kQueries;
                for (int64_t g = first; g < std::min(first + kQueries, heads_); ++g) {
                    const float *scores = scores_ + first * kBlock + g - first;
                    float *to = out + g * out_stride;
                    for (int r = 0; r < block.count; ++r) to[block.places[r]] = scores[r * kQueries];
                }
            });
        }
    }

    void finish(float *out, int64_t out_stride, float *lse, int64_t lse_stride) const {
        for_panels([&](auto panel, int64_t first) {
            constexpr int64_t kQueries = decltype(panel)::kQueries;
            for (int64_t g = first; g < std::min(first + kQueries, heads_); ++g) {
                const float *sums = out_ + first * value_dim_ + g - first;
                const bool empty = sum_[g] == 0.0f;
                const float factor = empty ? 0.0f : 1.0f / sum_[g];
                float *to = out + g * out_stride;
                for (int64_t d = 0; d < request_.value_dim; ++d) to[d] = sums[d * kQueries] * factor;
                lse[g * lse_stride] = empty ? -__builtin_inff() : top_[g] + std::log(sum_[g]);
            }
        });
    }

  private:
    // Calls work(panel, its first query) for panels that are as wide as each other, nearly.
    template <class Work> void for_panels(const Work &work) const {
        for (int64_t first = 0; first < lanes_;) {
            const int64_t left = (lanes_ - first) / I::lanes;
            const int64_t vectors = left % 3 == 0 ? 3 : std::min<int64_t>(left, 2);
            if (vectors == 3) work(Panel<I, float, 3>(), first);
            if (vectors == 2) work(Panel<I, float, 2>(), first);
            if (vectors == 1) work(Panel<I, float, 1>(), first);
            first += vectors * I::lanes;
        }
    }

    // Scores of a block, scaled and capped.
    void score(const Block &block) {
        for (int r = 0; r < block.count; r += kKeyRows) multiply_keys(block, r);
        const auto scale = static_cast<float>(request_.scale);
        const auto softcap = static_cast<float>(request_.softcap);
        for_panels([&](auto panel, int64_t first) {
            finish_scores<I>(scores_ + first * kBlock, block.count * decltype(panel)::kQueries,
                             scale, softcap);
        });
    }

    // Products of all queries with kKeyRows keys from `r` on; behind the last one it is taken again.
    void multiply_keys(const Block &block, int r) {
        for (int i = 0; i < kKeyRows; ++i) {
            const int row = std::min(r + i, block.count - 1);
            const int64_t bytes = request_.key_dim * static_cast<int64_t>(sizeof(T));
            for (int64_t line = kLine; line < bytes; line += kLine) {
                ask_for(block.keys_ahead[row] + line);
            }
            P::put_row(reinterpret_cast<const T *>(block.keys[row]), request_.key_dim,
                       strip_ + i * key_row_);
        }
        for_panels([&](auto panel, int64_t first) {
            constexpr int64_t kQueries = decltype(panel)::kQueries;
            Panel<I, M, kQueries / I::lanes>::template multiply<true>(
                strip_, key_row_, query_ + first * key_slots_, key_slots_,
                scores_ + first * kBlock + r * kQueries, kKeyRows);
        });
    }

    // Adds kColumns columns of values, from `d` on, times their weights.
    void add_values(const Block &block, int64_t d) {
        const int64_t columns = std::min(kColumns, value_dim_ - d);
        const int64_t count = std::min(kColumns, request_.value_dim - d);
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        const int64_t slots = (block.count + kInSlot - 1) / kInSlot;
        std::memset(strip_, 0, slots * kColumns * sizeof *strip_);
        for (int r = 0; r < block.count; ++r) {
            const char *ahead = block.values_ahead[r] + d * static_cast<int64_t>(sizeof(T));
            for (int64_t line = 0; line < bytes; line += kLine) ask_for(ahead + line);
            const T *from = reinterpret_cast<const T *>(block.values[r]) + d;
            float *to = strip_ + r / kInSlot * kColumns;
            if constexpr (kInSlot == 1) {
                P::put_row(from, count, to);
            } else {
                P::put_halves(from, count, to, r % kInSlot);
            }
        }
        for_panels([&](auto panel, int64_t first) {
            constexpr int64_t kQueries = decltype(panel)::kQueries;
            Panel<I, M, kQueries / I::lanes>::template multiply<false>(
                strip_, kColumns, scores_ + first * kBlock, slots,
                out_ + first * value_dim_ + d * kQueries, columns);
        });
    }

    const hfk_request &request_;
    const int64_t heads_, lanes_, key_slots_, key_row_, value_dim_;
    float *const query_, *const out_, *const scores_, *const top_, *const sum_, *const strip_;
};

} // namespace
