// Products of many query heads with rows that they share: an exact pass of some drafts, or heads that
// have one KV head. See rows.h on linkage.
//
// Some keys lie in a panel, one beside the other, or some columns of values, and the heads' queries or
// weights are broadcast: no sum goes across a vector, and what was loaded serves several heads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "panels.h"
#include "workspace.h"

namespace {

// From so many heads on, products of panels are quicker than those of a few heads at once.
constexpr int64_t kManyHeads = 12;

inline bool goes_in_panels(const hfk_request &request) {
    return request.coding == nullptr && request.query_heads >= kManyHeads * request.id_heads;
}

// Element j of vector i goes to element i of vector j.
template <class I> void transpose(typename I::V (&rows)[I::lanes]) {
    typename I::V next[I::lanes];
    HFK_UNROLL for (int step = 1; step < I::lanes; step *= 2) {
        HFK_UNROLL for (int i = 0; i < I::lanes / 2; ++i) {
            I::zip(rows[i], rows[i + I::lanes / 2], next[2 * i], next[2 * i + 1]);
        }
        HFK_UNROLL for (int i = 0; i < I::lanes; ++i) rows[i] = next[i];
    }
}

template <class I, class T> class ManyHeads {
    typedef typename I::V V;
    // Numbers are multiplied in this type. In bf16 the weights of values are rounded to it.
    typedef std::conditional_t<I::template multiplies<T>, T, float> M;
    typedef Panel<I, M> P;
    static constexpr int64_t kInSlot = P::kInSlot;
    static constexpr int64_t kColumns = P::kColumns;
    static_assert(kBlock % kColumns == 0 && kColumns <= kWidestPanel, "A block is whole panels.");

  public:
    // Head g's query lies from query(g) on.
    template <class Query>
    ManyHeads(const hfk_request &request, Workspace &space, const Query &query)
        : request_(request), space_(space), key_slots_((request.key_dim + kInSlot - 1) / kInSlot),
          query_row_(padded(key_slots_)) {
        for (int64_t g = 0; g < space.heads; ++g) {
            P::put_row(query(g), request.key_dim, space.query + g * query_row_);
        }
        // A tile of heads goes on behind the last one: nobody reads its products.
        const int64_t rows = rounded_up(space.heads, P::kFew);
        std::fill(space.query + space.heads * query_row_, space.query + rows * query_row_, 0.0f);
        std::fill(space.sums + space.heads * space.sum_stride,
                  space.sums + rows * space.sum_stride, 0.0f);
    }

    // Multiplies all queries with the keys of a block.
    void score(const Block &block) {
        const int64_t panels = (block.count + kColumns - 1) / kColumns;
        RowLines lines(block.keys_ahead, block.count, kLine, request_.key_dim * sizeof(T),
                       panels * P::calls(space_.heads, key_slots_));
        for (int r = 0; r < block.count; r += kColumns) {
            for (int i = 0; i < kColumns; i += I::lanes) put_keys(block, r + i, space_.panel + i);
            P::template multiply<false>(space_.query, query_row_, space_.panel, key_slots_,
                                        space_.scores + r, kBlock, space_.heads, lines);
        }
    }

    // Rescales the sums, and adds the block's values times their weights.
    void add_values(const Block &block) {
        for (int64_t g = 0; g < space_.heads; ++g) {
            float *weights = space_.scores + g * kBlock, *sums = space_.sums + g * space_.sum_stride;
            if constexpr (kInSlot != 1) P::pair_neighbours(weights, block.count);
            if (space_.rescale[g] == 1.0f) continue;
            const V factor = I::set1(space_.rescale[g]);
            for (int64_t d = 0; d < request_.value_dim; d += I::lanes) {
                I::store(sums + d, I::load(sums + d) * factor);
            }
        }
        const int64_t slots = (block.count + kInSlot - 1) / kInSlot;
        const int64_t panels = (request_.value_dim + kColumns - 1) / kColumns;
        RowLines lines(block.values_ahead, block.count, 0, request_.value_dim * sizeof(T),
                       panels * P::calls(space_.heads, slots));
        for (int64_t d = 0; d < request_.value_dim; d += kColumns) {
            put_values(block, d);
            P::template multiply<true>(space_.scores, kBlock, space_.panel, slots,
                                       space_.sums + d, space_.sum_stride, space_.heads, lines);
        }
    }

  private:
    // Puts keys from `r` on, one for each lane, into columns [key_slots, kColumns]. Lanes behind the
    // last key have that one, too.
    void put_keys(const Block &block, int r, float *columns) const {
        int row[I::lanes];
        for (int i = 0; i < I::lanes; ++i) row[i] = std::min(r + i, block.count - 1);
        for (int64_t d = 0; d < request_.key_dim; d += kInSlot * I::lanes) {
            V numbers[I::lanes];
            const int64_t left = request_.key_dim - d;
            const auto load = [&](auto from) {
                HFK_UNROLL for (int i = 0; i < I::lanes; ++i) {
                    numbers[i] = from(reinterpret_cast<const T *>(block.keys[row[i]]) + d);
                }
            };
            if (left >= kInSlot * I::lanes) {
                load([](const T *key) { return P::load_slots(key); });
            } else {
                load([left](const T *key) { return P::load_slots(key, left); });
            }
            transpose<I>(numbers);
            HFK_UNROLL for (int i = 0; i < I::lanes; ++i, columns += kColumns) {
                I::store(columns, numbers[i]);
            }
        }
    }

    // Puts columns of the block's values, from `d` on, into the panel.
    void put_values(const Block &block, int64_t d) const {
        const int64_t count = std::min<int64_t>(kColumns, request_.value_dim - d);
        float *to = space_.panel;
        for (int r = 0; r < block.count; r += kInSlot, to += kColumns) {
            const T *values[kInSlot] = {};
            for (int i = 0; i < kInSlot && r + i < block.count; ++i) {
                values[i] = reinterpret_cast<const T *>(block.values[r + i]) + d;
            }
            if constexpr (kInSlot == 1) {
                P::put_row(values[0], count, to);
            } else {
                P::put_pairs(values[0], values[1], count, to);
            }
        }
    }

    const hfk_request &request_;
    Workspace &space_;
    const int64_t key_slots_, query_row_;
};

} // namespace
