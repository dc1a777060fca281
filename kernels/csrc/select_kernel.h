// Choosing tokens by their scores, for any instruction set. See rows.h on linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attend_kernel.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// log of the sum of exp of n scores; -inf without any, NaN where one is.
template <class I> float log_sum(const float *scores, int64_t n) {
    using V = typename I::V;
    V top = I::set1(kNone);
    int64_t i = 0;
    for (; i + I::lanes <= n; i += I::lanes) top = I::max(top, I::load(scores + i));
    float largest = I::largest(top);
    for (int64_t j = i; j < n; ++j) largest = std::max(largest, scores[j]);
    if (largest == kNone) return kNone;
    const V base = I::set1(largest);
    V sum = I::set1(0.0f);
    for (i = 0; i + I::lanes <= n; i += I::lanes) {
        sum = sum + exp_of_nonpositive<I>(I::load(scores + i) - base);
    }
    float lanes[I::lanes];
    I::store(lanes, sum);
    float total = 0.0f;
    for (float part : lanes) total += part;
    for (; i < n; ++i) total += std::exp(scores[i] - largest);
    return largest + std::log(total);
}

template <class I>
void relevance(const float *scores, int64_t heads, int64_t stride, int64_t n, float *out) {
    using V = typename I::V;
    if (heads == 1) {
        std::copy(scores, scores + n, out);
        return;
    }
    std::fill(out, out + n, kNone);
    for (int64_t g = 0; g < heads; ++g) {
        const float *row = scores + g * stride;
        const float lse = log_sum<I>(row, n);
        if (lse == kNone) continue;
        const V shift = I::set1(lse);
        int64_t i = 0;
        for (; i + I::lanes <= n; i += I::lanes) {
            const V most = I::load(out + i), own = I::load(row + i) - shift;
            // NaN is not more than anything.
            I::store(out + i, I::where_less(most, own, own, most));
        }
        for (; i < n; ++i) out[i] = std::max(out[i], row[i] - lse);
    }
}

// Numbers that compare as the floats do.
inline int32_t ordinal(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

inline float of_ordinal(int32_t bits) {
    bits = bits >= 0 ? bits : bits ^ 0x7fffffff;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// How many of n numbers, a multiple of 16, are at least `limit`.
template <class I> int64_t count_at_least(const float *numbers, int64_t n, float limit) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) count += __builtin_popcount(I::at_least16(numbers + i, limit));
    return count;
}

// Bisects for the k-th largest number: first by value, which is quick where numbers are spread
// evenly, then by the order of floats, which always ends.
template <class I>
void best(float *relevance, int64_t n, const int32_t *ids, int64_t k, int32_t *out) {
    const int64_t end = padded(n);
    std::fill(relevance + n, relevance + end, kNone);
    using V = typename I::V;
    const V none = I::set1(kNone), zero = I::set1(0.0f);
    V top = none, lowest = none; // the largest of all numbers, and of all with their signs changed
    for (int64_t i = 0; i < end; i += I::lanes) {
        const V given = I::load(relevance + i);
        const V x = I::where_less(none, given, given, none); // NaN is no number
        I::store(relevance + i, x);
        top = I::max(top, x);
        lowest = I::max(lowest, I::where_less(none, x, zero - x, none));
    }
    const float largest = I::largest(top), smallest = -I::largest(lowest);
    const int64_t known =
        count_at_least<I>(relevance, end, std::numeric_limits<float>::lowest());
    // Chosen are all above `high`, and of those at `low`, the ordinal before it, the first ones.
    int64_t low = ordinal(smallest), high = low, above = known, left = 0;
    if (known > k) {
        high = static_cast<int64_t>(ordinal(largest)) + 1, above = 0;
        for (int round = 0; high - low > 1 && above != k; ++round) {
            int64_t middle = (low + high) / 2;
            if (round < 24 && round % 2 == 0) {
                const float top = std::min(of_ordinal(static_cast<int32_t>(high - 1)), 3.4e38f);
                const float bottom = std::max(of_ordinal(static_cast<int32_t>(low)), -3.4e38f);
                const int64_t half = ordinal(bottom + 0.5f * (top - bottom));
                if (half > low && half < high) middle = half;
            }
            const int64_t count =
                count_at_least<I>(relevance, end, of_ordinal(static_cast<int32_t>(middle)));
            if (count >= k) {
                low = middle;
                if (count == k) high = middle, above = k;
            } else {
                high = middle, above = count;
            }
        }
        left = k - above;
    }
    int64_t found = 0;
    const float floor = of_ordinal(static_cast<int32_t>(high));
    const float level = of_ordinal(static_cast<int32_t>(low));
    // Without a known number there is no floor to compare with.
    for (int64_t i = 0; known > 0 && i < end && found < k; i += 16) {
        uint32_t chosen = I::at_least16(relevance + i, floor);
        if (left > 0) {
            uint32_t equal = I::at_least16(relevance + i, level) & ~chosen;
            while (__builtin_popcount(equal) > left) equal &= ~(0x80000000u >> __builtin_clz(equal));
            left -= __builtin_popcount(equal);
            chosen |= equal;
        }
        // Where the largest number is a zero, the floor above it does not always exceed the others:
        // -0 equals 0, and a processor may take the smallest numbers for 0.
        for (; chosen != 0 && found < k; chosen &= chosen - 1) {
            const int64_t place = i + __builtin_ctz(chosen);
            out[found++] = ids == nullptr ? static_cast<int32_t>(place) : ids[place];
        }
    }
    std::fill(out + found, out + k, -1);
}

// Rows at equal distances, to be scored; `space` has the queries.
struct ScoredRows {
    const void *rows;
    int64_t row_bytes, dim, first, last;
    const uint8_t *valid;
    const float *offsets; // of each head; null for none
    float scale, softcap;
    float *out;
    int64_t stride;
};

template <class I, class T> void score_rows(const Workspace &space, const ScoredRows &work) {
    const char *from = static_cast<const char *>(work.rows) + work.first * work.row_bytes;
    DenseStream stream(from, work.row_bytes, from, work.row_bytes, work.last - work.first, nullptr);
    Block block;
    for (stream.take(block); block.count > 0; stream.take(block)) {
        for_head_tiles<I::heads>(space.heads, DotTiles<I, T>{block, work.dim, space});
        const int64_t first = work.first + block.places[0];
        for (int64_t g = 0; g < space.heads; ++g) {
            float *scores = space.scores + g * kBlock;
            const float offset = work.offsets == nullptr ? 0.0f : work.offsets[g];
            for (int r = 0; r < block.count; ++r) scores[r] += offset;
            finish_scores<I>(scores, padded(block.count), work.scale, work.softcap);
            float *to = work.out + g * work.stride + first;
            for (int r = 0; r < block.count; ++r) {
                to[r] = work.valid == nullptr || work.valid[first + r] ? scores[r] : kNone;
            }
        }
    }
}

template <class I, class T>
void dense_scores(const hfk_request &request, const Span &span, const void *keys,
                  const uint8_t *valid, float *scratch, float *out, int64_t out_stride) {
    Workspace space(request, scratch);
    load_query<I, T>(request, span, space);
    const int64_t row_bytes = request.key_dim * static_cast<int64_t>(sizeof(T));
    score_rows<I, T>(space, {keys, row_bytes, request.key_dim, span.first, span.last, valid, nullptr,
                             static_cast<float>(request.scale),
                             static_cast<float>(request.softcap), out, out_stride});
}

// Puts numbers into the order in which a pair of vectors of the type `T` holds them.
template <class I, class T> void order_query(const float *from, int64_t dim, float *to) {
    int64_t d = 0;
    if constexpr (splits<T>) {
        for (; d + 2 * I::lanes <= dim; d += 2 * I::lanes) {
            for (int i = 0; i < I::lanes; ++i) {
                to[d + i] = from[d + 2 * i];
                to[d + I::lanes + i] = from[d + 2 * i + 1];
            }
        }
    }
    for (; d < dim; ++d) to[d] = from[d];
    // A vector reads behind the last number: that is multiplied with zeros.
    for (; d < padded(dim); ++d) to[d] = 0.0f;
}

template <class I, class T> void proxy_scores(const ProxyScores &work) {
    hfk_request shape{};
    shape.query_heads = work.heads, shape.id_heads = 1;
    shape.key_dim = work.rank, shape.value_dim = 1;
    Workspace space(shape, work.scratch);
    for (int64_t g = 0; g < work.heads; ++g) {
        order_query<I, T>(work.queries[g], work.rank, space.query + g * space.query_stride);
    }
    score_rows<I, T>(space, {work.rows, work.row_bytes, work.rank, work.first, work.last, work.valid,
                             work.offsets, 1.0f, work.softcap, work.out, work.stride});
}

template <class I> struct SelectEntry {
    static void proxy_scores_any(const ProxyScores &work) {
        auto *run = work.dtype == HFK_INT8       ? proxy_scores<I, Int8>
                    : work.dtype == HFK_BFLOAT16 ? proxy_scores<I, Bf16>
                    : work.dtype == HFK_FLOAT16  ? proxy_scores<I, Half>
                                                 : proxy_scores<I, float>;
        run(work);
    }

    static void dense_scores_any(const hfk_request &request, const Span &span, const void *keys,
                                 const uint8_t *valid, float *scratch, float *out,
                                 int64_t out_stride) {
        auto *run = request.dtype == HFK_BFLOAT16  ? dense_scores<I, Bf16>
                    : request.dtype == HFK_FLOAT16 ? dense_scores<I, Half>
                                                   : dense_scores<I, float>;
        run(request, span, keys, valid, scratch, out, out_stride);
    }
};

} // namespace
