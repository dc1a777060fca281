// The inner loops: a block of rows against a tile of query heads. See rows.h on linkage.
//
// `I` gives vectors `V` of `lanes` floats with loads, fma and the like; `T` is the type of the rows;
// `H` query heads go together, so that each element of a row is converted to fp32 once for them all.
#pragma once

#include "rows.h"

#ifdef __clang__
#define HFK_UNROLL _Pragma("unroll")
#else
#define HFK_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

// Dot products of `H` query heads with `count` keys: scores[g * kBlock + r].
template <class I, class T, int H>
void dot_heads(const Block &block, const float *query, int64_t query_stride, int64_t dim,
               float *scores) {
    using V = typename I::V;
    constexpr int R = 4;
    constexpr int64_t line = kLine / sizeof(T);
    for (int r = 0; r < block.count; r += R) {
        const T *keys[R], *ahead[R];
        for (int i = 0; i < R; ++i) {
            const int row = r + i < block.count ? r + i : block.count - 1;
            keys[i] = reinterpret_cast<const T *>(block.rows[row]);
            ahead[i] = reinterpret_cast<const T *>(block.ahead[row]);
        }
        V sums[H][R];
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::set1(0.0f);
        }
        int64_t d = 0;
        for (; d + I::lanes <= dim; d += I::lanes) {
            if (d % line == 0) {
                for (int i = 0; i < R; ++i) ask_for(reinterpret_cast<const char *>(ahead[i] + d));
            }
            V key[R];
            HFK_UNROLL for (int i = 0; i < R; ++i) key[i] = I::load(keys[i] + d);
            HFK_UNROLL for (int g = 0; g < H; ++g) {
                const V q = I::load(query + g * query_stride + d);
                HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::fma(key[i], q, sums[g][i]);
            }
        }
        if (d < dim) {
            const int rest = static_cast<int>(dim - d);
            V key[R];
            HFK_UNROLL for (int i = 0; i < R; ++i) key[i] = I::load_some(keys[i] + d, rest);
            HFK_UNROLL for (int g = 0; g < H; ++g) {
                const V q = I::load(query + g * query_stride + d);
                HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::fma(key[i], q, sums[g][i]);
            }
        }
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            I::store_sums(scores + g * kBlock + r, sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
        }
    }
}

// `C` vectors of the sums of `H` heads: rescaled, plus the block's values times their weights.
template <class I, class T, int H, int C>
void add_columns(const Block &block, int64_t offset, const float *weights, const float *rescale,
                 float *sums, int64_t sum_stride) {
    using V = typename I::V;
    constexpr int64_t bytes = C * I::lanes * sizeof(T);
    V sum[H][C];
    HFK_UNROLL for (int g = 0; g < H; ++g) {
        const V factor = I::set1(rescale[g]);
        HFK_UNROLL for (int c = 0; c < C; ++c) {
            sum[g][c] = I::load(sums + g * sum_stride + c * I::lanes) * factor;
        }
    }
    for (int r = 0; r < block.count; ++r) {
        const char *ahead = block.ahead[r] + offset * static_cast<int64_t>(sizeof(T));
        HFK_UNROLL for (int64_t byte = 0; byte < bytes; byte += kLine) ask_for(ahead + byte);
        const T *row = reinterpret_cast<const T *>(block.rows[r]) + offset;
        V value[C];
        HFK_UNROLL for (int c = 0; c < C; ++c) value[c] = I::load(row + c * I::lanes);
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            const V weight = I::set1(weights[g * kBlock + r]);
            HFK_UNROLL for (int c = 0; c < C; ++c) sum[g][c] = I::fma(weight, value[c], sum[g][c]);
        }
    }
    HFK_UNROLL for (int g = 0; g < H; ++g) {
        HFK_UNROLL for (int c = 0; c < C; ++c) {
            I::store(sums + g * sum_stride + c * I::lanes, sum[g][c]);
        }
    }
}

// The last columns, fewer than a vector holds.
template <class I, class T, int H>
void add_last_columns(const Block &block, int64_t offset, int columns, const float *weights,
                      const float *rescale, float *sums, int64_t sum_stride) {
    using V = typename I::V;
    V sum[H];
    HFK_UNROLL for (int g = 0; g < H; ++g) {
        sum[g] = I::load(sums + g * sum_stride) * I::set1(rescale[g]);
    }
    for (int r = 0; r < block.count; ++r) {
        const V value = I::load_some(reinterpret_cast<const T *>(block.rows[r]) + offset, columns);
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            sum[g] = I::fma(I::set1(weights[g * kBlock + r]), value, sum[g]);
        }
    }
    HFK_UNROLL for (int g = 0; g < H; ++g) I::store(sums + g * sum_stride, sum[g]);
}

template <class I, class T, int H>
void add_values(const Block &block, int64_t key_dim, int64_t dim, const float *weights,
                const float *rescale, float *sums, int64_t sum_stride) {
    constexpr int C = I::columns;
    int64_t d = 0;
    for (; d + C * I::lanes <= dim; d += C * I::lanes) {
        add_columns<I, T, H, C>(block, key_dim + d, weights, rescale, sums + d, sum_stride);
    }
    for (; d + I::lanes <= dim; d += I::lanes) {
        add_columns<I, T, H, 1>(block, key_dim + d, weights, rescale, sums + d, sum_stride);
    }
    if (d < dim) {
        add_last_columns<I, T, H>(block, key_dim + d, static_cast<int>(dim - d), weights,
                                  rescale, sums + d, sum_stride);
    }
}

} // namespace
