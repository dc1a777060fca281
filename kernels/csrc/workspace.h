// The kernels work in this memory. See rows.h on linkage.
#pragma once

#include <algorithm>

#include "coded_rows.h"

namespace {

// Panels have at most so many columns, and there is room for a multiple of so many heads.
constexpr int64_t kWidestPanel = 32, kHeadTile = 4;

inline int64_t rounded_up(int64_t number, int64_t multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

// Scratch of one span, cut from one buffer.
struct Workspace {
    Workspace(const hfk_request &request, float *scratch)
        : heads(request.query_heads / request.id_heads), query_stride(padded(request.key_dim)),
          sum_stride(rounded_up(request.value_dim, kWidestPanel)) {
        const int64_t rows = rounded_up(heads, kHeadTile);
        query = scratch;
        sums = query + rows * query_stride;
        scores = sums + rows * sum_stride;
        weight_sums = scores + rows * kBlock;
        largest = weight_sums + heads * kPad;
        rescale = largest + heads;
        mean_scores = rescale + heads;
        coded = panel = mean_scores + heads;
    }

    static int64_t floats(const hfk_request &request) {
        const int64_t heads = rounded_up(request.query_heads / request.id_heads, kHeadTile);
        const int64_t key_dim = padded(request.key_dim);
        const int64_t value_dim = rounded_up(request.value_dim, kWidestPanel);
        const int64_t block = request.coding != nullptr
                                  ? coded_block_floats(request)
                                  : kWidestPanel * std::max<int64_t>(key_dim, kBlock);
        return heads * (key_dim + value_dim + kBlock + kPad + 3) + block;
    }

    int64_t heads, query_stride, sum_stride;
    float *query, *sums, *scores, *weight_sums, *largest, *rescale;
    // Products of each head's query with what was taken off the keys; they are 0 for plain rows.
    float *mean_scores;
    // Room for a block of coded rows, or for a panel.
    float *coded, *panel;
    // The query heads in the request.
    const void *given = nullptr;
    int64_t given_stride = 0;
};

// Makes sums that hold no row.
inline void clear(Workspace &space) {
    std::fill_n(space.sums, space.heads * space.sum_stride, 0.0f);
    std::fill_n(space.weight_sums, space.heads * kPad, 0.0f);
    std::fill_n(space.largest, space.heads, -__builtin_inff());
    std::fill_n(space.mean_scores, space.heads, 0.0f);
}

} // namespace
