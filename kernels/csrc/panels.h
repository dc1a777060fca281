// Products of blocks with an online softmax between them. See rows.h on linkage.
//
// Queries lie beside each other in panels, and so do their scores and outputs: element i of a vector
// belongs to query i, and no sum goes across a vector. Keys and values are read one number at a time,
// which is broadcast, as they lie in a row.
//
// `M` is what products are of: fp32 numbers, or bf16 as it is given, where `I` multiplies it. Sums are
// fp32. A slot is four bytes of the work space: a number of fp32, or two neighbours in bf16.
#pragma once

#include <limits>

#include "tiles.h"
#include "vector_math.h"

namespace {

// A panel of `kVectors` vectors of queries.
template <class I, class M, int kVectors> struct Panel {
    typedef typename I::V V;
    static constexpr int64_t kInSlot = sizeof(float) / sizeof(M);
    // Sums of so many rows and three vectors fill the registers.
    static constexpr int kRows = I::few_registers ? 4 : 8;
    static constexpr int64_t kQueries = kVectors * I::lanes;

    // Weights are exp(score - base): the base is `top`, the largest score, or 0 where no key is seen.
    static V base_of(V top) {
        const V lowest = I::set1(std::numeric_limits<float>::lowest());
        return I::where_less(top, lowest, I::set1(0.0f), top);
    }

    static V largest(const float *scores, int64_t count, V top) {
        for (int64_t j = 0; j < count; ++j) top = I::max(top, I::load(scores + j * kQueries));
        return top;
    }

    // Replaces scores by exp(score - base), and sums these. NaN stays.
    static V to_weights(float *scores, int64_t count, V base) {
        V sum = I::set1(0.0f);
        for (int64_t j = 0; j < count; ++j) {
            const V weight = exp_of_nonpositive<I>(I::load(scores + j * kQueries) - base);
            I::store(scores + j * kQueries, weight);
            sum = sum + weight;
        }
        return sum;
    }

    // A step of the online softmax: turns scores [count, kQueries] into weights under their queries'
    // new largest scores `top`, and rescales what was summed so far, out [value_dim, kQueries] too.
    static void update_softmax(float *scores, int64_t count, float *top, float *sum, float *out,
                               int64_t value_dim) {
        float rescale[kQueries];
        bool rescales = false;
        for (int64_t c = 0; c < kQueries; c += I::lanes) {
            const V before = I::load(top + c);
            const V now = largest(scores + c, count, before);
            const V base = base_of(now);
            I::store(top + c, now);
            I::store(rescale + c, exp_of_nonpositive<I>(before - base));
            const V old = I::load(sum + c) * I::load(rescale + c);
            I::store(sum + c, old + to_weights(scores + c, count, base));
            for (int64_t i = c; i < c + I::lanes; ++i) rescales |= rescale[i] != 1.0f;
        }
        if (!rescales) return;
        for (int64_t d = 0; d < value_dim; ++d, out += kQueries) {
            for (int64_t c = 0; c < kQueries; c += I::lanes) {
                I::store(out + c, I::load(out + c) * I::load(rescale + c));
            }
        }
    }

    // A key or query as products read it, in whole slots: an odd number of halves has a 0 behind it.
    template <class T> static void put_row(const T *from, int64_t count, float *to) {
        if constexpr (kInSlot == 1) {
            int64_t i = 0;
            for (; i + I::lanes <= count; i += I::lanes) I::store(to + i, I::load(from + i));
            if (i < count) I::store(to + i, I::load_some(from + i, static_cast<int>(count - i)));
        } else {
            to[(count - 1) / 2] = 0.0f;
            __builtin_memcpy(to, from, count * sizeof(T));
        }
    }

    // Puts numbers into first or second halves of slots: the others are zeros, or were put before.
    static void put_halves(const M *from, int64_t count, float *to, int half) {
        for (int64_t i = 0; i < count; ++i) {
            uint32_t slot;
            __builtin_memcpy(&slot, to + i, sizeof slot);
            slot |= static_cast<uint32_t>(from[i].bits) << 16 * half;
            __builtin_memcpy(to + i, &slot, sizeof slot);
        }
    }

    // Rounds weights [count, kQueries] to bf16, those of two rows to one slot; an odd one has a 0.
    static void pair_weights(float *weights, int64_t count) {
        for (int64_t j = 0; j < count; j += 2) {
            for (int64_t c = 0; c < kQueries; c += I::lanes) {
                const float *from = weights + j * kQueries + c;
                const V next = j + 1 < count ? I::load(from + kQueries) : I::set1(0.0f);
                I::store(weights + j / 2 * kQueries + c, I::rounded_pair(I::load(from), next));
            }
        }
    }

    // Writes a b to c [rows, kQueries], or adds it, b [depth, kQueries]. With `Scores` the rows of a
    // are rows of c, which is written; else a's columns are, and c is added to. Within its callers
    // the compiler keeps the addresses of rows in memory, and not in registers: so it is never
    // inlined.
    template <bool Scores>
    __attribute__((noinline)) static void multiply(const float *a, int64_t a_row, const float *b,
                                                   int64_t depth, float *c, int64_t rows) {
        for (int64_t row = 0; row < rows; row += kRows) {
            multiply_strip<Scores>(a + row * (Scores ? a_row : 1), a_row, b, depth,
                                   c + row * kQueries);
        }
    }

  private:
    template <bool Scores>
    static void multiply_strip(const float *a, int64_t a_row, const float *b, int64_t depth,
                               float *c) {
        V sums[kRows][kVectors];
        HFK_UNROLL for (int r = 0; r < kRows; ++r) {
            HFK_UNROLL for (int v = 0; v < kVectors; ++v) {
                sums[r][v] = Scores ? I::set1(0.0f) : I::load(c + r * kQueries + v * I::lanes);
            }
        }
        for (int64_t k = 0; k < depth; ++k, b += kQueries, a += Scores ? 1 : a_row) {
            V column[kVectors];
            HFK_UNROLL for (int v = 0; v < kVectors; ++v) column[v] = I::load(b + v * I::lanes);
            HFK_UNROLL for (int r = 0; r < kRows; ++r) {
                const V factor = I::set1(a[Scores ? r * a_row : r]);
                HFK_UNROLL for (int v = 0; v < kVectors; ++v) {
                    sums[r][v] = multiply_add(factor, column[v], sums[r][v]);
                }
            }
        }
        HFK_UNROLL for (int r = 0; r < kRows; ++r) {
            HFK_UNROLL for (int v = 0; v < kVectors; ++v) {
                I::store(c + r * kQueries + v * I::lanes, sums[r][v]);
            }
        }
    }

    static V multiply_add(V a, V b, V sum) {
        if constexpr (kInSlot == 1) {
            return I::fma(a, b, sum);
        } else {
            return I::multiply_add(I::as_pair(a), I::as_pair(b), sum);
        }
    }
};

} // namespace
