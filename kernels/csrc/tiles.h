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

// Query heads that share a selection.
struct Queries {
    const float *numbers; // [heads, stride], in the order of pairs
    int64_t stride;
    const void *given; // [heads, given_stride] of the rows' type, in their own order
    int64_t given_stride;
};

// Sums of products of `H` query heads with `R` keys, two vectors from element `d` on.
template <class I, class T, int H, int R>
inline void dot_pair(const T *const (&keys)[R], const Queries &queries, int64_t d,
                     typename I::V (&sums)[H][R]) {
    using V = typename I::V;
    if constexpr (I::template multiplies<T>) {
        typename I::Pair key[R];
        HFK_UNROLL for (int i = 0; i < R; ++i) key[i] = I::load_bits(keys[i] + d);
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            const T *from = static_cast<const T *>(queries.given) + g * queries.given_stride;
            const typename I::Pair q = I::load_bits(from + d);
            HFK_UNROLL for (int i = 0; i < R; ++i) {
                sums[g][i] = I::multiply_add(key[i], q, sums[g][i]);
            }
        }
    } else if constexpr (splits<T>) {
        V low[R], high[R];
        HFK_UNROLL for (int i = 0; i < R; ++i) I::load_pair(keys[i] + d, low[i], high[i]);
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            const V q = I::load(queries.numbers + g * queries.stride + d);
            HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::fma(low[i], q, sums[g][i]);
        }
        if constexpr (I::few_registers) {
            // Load the keys again, rather than keep both halves of them.
            __asm__ volatile("" ::: "memory");
            HFK_UNROLL for (int i = 0; i < R; ++i) I::load_pair(keys[i] + d, low[i], high[i]);
        }
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            const V q = I::load(queries.numbers + g * queries.stride + d + I::lanes);
            HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::fma(high[i], q, sums[g][i]);
        }
    } else {
        HFK_UNROLL for (int64_t e = d; e < d + 2 * I::lanes; e += I::lanes) {
            V key[R];
            HFK_UNROLL for (int i = 0; i < R; ++i) key[i] = I::load(keys[i] + e);
            HFK_UNROLL for (int g = 0; g < H; ++g) {
                const V q = I::load(queries.numbers + g * queries.stride + e);
                HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::fma(key[i], q, sums[g][i]);
            }
        }
    }
}

// Dot products of `H` query heads with the block's keys: scores[g * kBlock + r].
template <class I, class T, int H>
void dot_heads(const Block &block, const Queries &queries, int64_t dim, float *scores) {
    using V = typename I::V;
    constexpr int R = 4;
    constexpr int64_t pair_bytes = 2 * I::lanes * sizeof(T);
    for (int r = 0; r < block.count; r += R) {
        const T *keys[R];
        const char *ahead[R];
        for (int i = 0; i < R; ++i) {
            const int row = r + i < block.count ? r + i : block.count - 1;
            keys[i] = reinterpret_cast<const T *>(block.keys[row]);
            ahead[i] = block.keys_ahead[row];
        }
        V sums[H][R];
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            HFK_UNROLL for (int i = 0; i < R; ++i) sums[g][i] = I::set1(0.0f);
        }
        // The lines of the rows to come that begin within `bytes` from element `d` on.
        const auto ask = [&ahead](int64_t d, int64_t bytes) {
            const int64_t start = d * static_cast<int64_t>(sizeof(T));
            if (start % kLine != 0) return;
            HFK_UNROLL for (int64_t line = 0; line < bytes; line += kLine) {
                HFK_UNROLL for (int i = 0; i < R; ++i) ask_for(ahead[i] + start + line);
            }
        };
        int64_t d = 0;
        for (; d + 2 * I::lanes <= dim; d += 2 * I::lanes) {
            ask(d, pair_bytes);
            dot_pair<I, T, H, R>(keys, queries, d, sums);
        }
        for (; d < dim; d += I::lanes) {
            ask(d, 1);
            const int64_t rest = dim - d;
            V key[R];
            HFK_UNROLL for (int i = 0; i < R; ++i) {
                key[i] = rest < I::lanes ? I::load_some(keys[i] + d, static_cast<int>(rest))
                                         : I::load(keys[i] + d);
            }
            HFK_UNROLL for (int g = 0; g < H; ++g) {
                const V q = I::load(queries.numbers + g * queries.stride + d);
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
        const char *ahead = block.values_ahead[r] + offset * static_cast<int64_t>(sizeof(T));
        HFK_UNROLL for (int64_t byte = 0; byte < bytes; byte += kLine) ask_for(ahead + byte);
        const T *row = reinterpret_cast<const T *>(block.values[r]) + offset;
        V value[C];
        if constexpr (C == 1) {
            value[0] = I::load(row);
        } else {
            HFK_UNROLL for (int c = 0; c < C; c += 2) {
                I::load_pair(row + c * I::lanes, value[c], value[c + 1]);
            }
        }
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
        const V value = I::load_some(reinterpret_cast<const T *>(block.values[r]) + offset, columns);
        HFK_UNROLL for (int g = 0; g < H; ++g) {
            sum[g] = I::fma(I::set1(weights[g * kBlock + r]), value, sum[g]);
        }
    }
    HFK_UNROLL for (int g = 0; g < H; ++g) I::store(sums + g * sum_stride, sum[g]);
}

template <class I, class T, int H>
void add_values(const Block &block, int64_t dim, const float *weights, const float *rescale,
                float *sums, int64_t sum_stride) {
    constexpr int C = I::columns;
    int64_t d = 0;
    for (; d + C * I::lanes <= dim; d += C * I::lanes) {
        add_columns<I, T, H, C>(block, d, weights, rescale, sums + d, sum_stride);
    }
    for (; d + 2 * I::lanes <= dim; d += 2 * I::lanes) {
        add_columns<I, T, H, 2>(block, d, weights, rescale, sums + d, sum_stride);
    }
    for (; d + I::lanes <= dim; d += I::lanes) {
        add_columns<I, T, H, 1>(block, d, weights, rescale, sums + d, sum_stride);
    }
    if (d < dim) {
        add_last_columns<I, T, H>(block, d, static_cast<int>(dim - d), weights,
                                  rescale, sums + d, sum_stride);
    }
}

} // namespace
