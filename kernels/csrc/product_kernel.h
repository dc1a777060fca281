// Products of a weight and few tokens. See rows.h on linkage.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "rows.h"
#include "tiles.h"

namespace {

// Weights are asked for so many bytes ahead, across rows: a single thread then has the bandwidth
// of its processor.
constexpr int64_t kProductAhead = 4096;

template <class I> class ProductWork {
    typedef typename I::V V;
    static constexpr int64_t kPair = 2 * I::lanes;
    static constexpr int kRows = 4;

  public:
    // Outputs `first .. last`; `x` has room for the tokens, product_stride() apart.
    static void run(const hfk_product &work, int64_t first, int64_t last, float *x) {
        if (work.dtype == HFK_FLOAT32) run_as<float>(work, first, last, x);
        if (work.dtype == HFK_FLOAT16) run_as<Half>(work, first, last, x);
        if (work.dtype == HFK_BFLOAT16) run_as<Bf16>(work, first, last, x);
    }

  private:
    template <class T>
    static void run_as(const hfk_product &work, int64_t first, int64_t last, float *x) {
        const int64_t depth = work.depth, stride = product_stride(work);
        for (int64_t t = 0; t < work.tokens; ++t) {
            read_token(static_cast<const T *>(work.x) + t * depth, depth, x + t * stride);
        }
        for (int64_t row = first; row < last; row += kRows) {
            for (int64_t t = 0; t < work.tokens; t += 4) {
                const int64_t left = work.tokens - t;
                if (left == 1) multiply<T, 1>(work, row, last, x, t);
                if (left == 2) multiply<T, 2>(work, row, last, x, t);
                if (left > 2) multiply<T, 4>(work, row, last, x, t);
            }
        }
    }

    // kRows outputs, up to `last`, of N tokens from `first` on; behind the last token it comes again.
    template <class T, int N>
    static void multiply(const hfk_product &work, int64_t row, int64_t last, const float *x,
                         int64_t first) {
        const int64_t count = std::min<int64_t>(kRows, last - row);
        const T *weights = static_cast<const T *>(work.weight) + row * work.depth;
        const float *tokens[N];
        for (int t = 0; t < N; ++t) {
            tokens[t] = x + std::min(first + t, work.tokens - 1) * product_stride(work);
        }
        V sums[N][kRows];
        for (int i = 0; i < kRows; ++i) {
            V own[N];
            dot(weights + std::min<int64_t>(i, count - 1) * work.depth, tokens, work.depth, own);
            for (int t = 0; t < N; ++t) sums[t][i] = own[t];
        }
        for (int t = 0; t < N && first + t < work.tokens; ++t) {
            float results[kRows];
            I::store_sums(results, sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
            for (int64_t i = 0; i < count && work.bias != nullptr; ++i) {
                results[i] += number_at(work.bias, work.dtype, row + i);
            }
            const int64_t place = (first + t) * work.outputs + row;
            write_numbers(results, work.dtype, static_cast<T *>(work.out) + place, count);
        }
    }

    // Numbers in the order in which weights are loaded, see rows.h.
    template <class T> static void read_token(const T *from, int64_t depth, float *to) {
        V a, b;
        int64_t k = 0;
        for (; k + kPair <= depth; k += kPair) {
            I::load_pair(from + k, a, b);
            I::store(to + k, a);
            I::store(to + k + I::lanes, b);
        }
        for (; k < depth; k += I::lanes) I::store(to + k, load_rest(from + k, depth - k));
    }

    // Products of a row of the weight with N tokens.
    template <class T, int N>
    static void dot(const T *weights, const float *const (&x)[N], int64_t depth, V (&sums)[N]) {
        V even[N], odd[N];
        HFK_UNROLL for (int t = 0; t < N; ++t) even[t] = odd[t] = I::set1(0.0f);
        int64_t k = 0;
        for (; k + kPair <= depth; k += kPair) {
            // The last ones lie behind the weight, which is harmless.
            const char *ahead = reinterpret_cast<const char *>(weights + k) + kProductAhead;
            for (size_t line = 0; line < kPair * sizeof(T); line += kLine) ask_for(ahead + line);
            V a, b;
            I::load_pair(weights + k, a, b);
            HFK_UNROLL for (int t = 0; t < N; ++t) {
                even[t] = I::fma(a, I::load(x[t] + k), even[t]);
                odd[t] = I::fma(b, I::load(x[t] + k + I::lanes), odd[t]);
            }
        }
        for (; k < depth; k += I::lanes) {
            const V rest = load_rest(weights + k, depth - k);
            HFK_UNROLL for (int t = 0; t < N; ++t) {
                even[t] = I::fma(rest, I::load(x[t] + k), even[t]);
            }
        }
        HFK_UNROLL for (int t = 0; t < N; ++t) sums[t] = even[t] + odd[t];
    }

    template <class T> static V load_rest(const T *from, int64_t count) {
        return count >= I::lanes ? I::load(from) : I::load_some(from, static_cast<int>(count));
    }
};

} // namespace
