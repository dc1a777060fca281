// ParisKV's search, for any instruction set: points of centroids, the scan over sign bytes,
// candidates, and estimates from codes. See rows.h on linkage, paris/naive.py for the meaning.
#pragma once

#include "numbers.h"
#include "product_kernel.h"
#include "prompt_kernel.h"
#include "select_kernel.h"

namespace {


constexpr int kCentroids = 256;

// Similarities of eight coordinates with all sign patterns; returns the largest.
inline float similarities(const float *query, float *sims) {
    float size = 0.0f;
    sims[0] = 0.0f;
    // One coordinate after the other, as the naive code adds them; the first half has it negative.
    for (int j = 0; j < 8; ++j) {
        const int half = 1 << j;
        const float x = query[j];
        for (int c = 0; c < half; ++c) sims[half + c] = sims[c] + x;
        for (int c = 0; c < half; ++c) sims[c] -= x;
        size += std::fabs(x);
    }
    return size;
}

// Points that rise with the similarity, `scale` for 1, see paris/naive.py.
inline void similar_points(const float *query, float scale, uint8_t *points) {
    float sims[256];
    similarities(query, sims);
    for (int c = 0; c < 256; ++c) {
        float own = std::floor(sims[c] * scale) + kZeroPoints;
        own = own > 0.0f ? own : 0.0f;
        own = own < kMostSimilar ? own : static_cast<float>(kMostSimilar);
        points[c] = static_cast<uint8_t>(static_cast<int32_t>(own));
    }
}

// The points of the members of a bin that limits fall into, in descending order of similarity, with
// `ahead` keys in the bins before.
template <class I>
void sort_bin(uint8_t bin, const uint8_t *bins, const float *sims, const int32_t *counts,
              int32_t ahead, const int64_t *limits, int64_t tiers, uint8_t *points) {
    int members[kCentroids], count = 0;
    for (int first = 0; first < kCentroids; first += 64) {
        uint64_t within = I::at_least64(bins + first, bin);
        if (bin < 255) within &= ~I::at_least64(bins + first, static_cast<uint8_t>(bin + 1));
        for (; within != 0; within &= within - 1) {
            // Numbers rise, so that one goes behind equal ones that are there.
            const int c = first + __builtin_ctzll(within);
            int place = count++;
            for (; place > 0 && sims[members[place - 1]] < sims[c]; --place) {
                members[place] = members[place - 1];
            }
            members[place] = c;
        }
    }
    for (int i = 0; i < count; ++i) {
        uint8_t own = 0;
        for (int64_t t = 0; t < tiers; ++t) own += ahead < limits[t];
        points[members[i]] = own;
        ahead += counts[members[i]];
    }
}

// Gives each centroid of one subspace its points: one for each limit that is above the
// number of keys in the centroids ahead, in descending order of similarity, ties by lower number.
// Limits rise.
//
// Centroids are put into bins by their similarity, which is as good as sorting them, but for the
// bins that a limit falls into: their members are sorted.
template <class I>
void sign_points(const float *query, const int32_t *counts, const int64_t *limits,
                 int64_t tiers, uint8_t *points) {
    constexpr int kBins = 256;
    float sims[kCentroids];
    const float size = similarities(query, sims);
    // Falls with similarity, also after rounding. Numbers that are not finite stay within the bins.
    const float top = size * 1.000001f, scale = size > 0.0f ? 127.49f / size : 0.0f;
    alignas(64) uint8_t bins[kCentroids];
    for (int c = 0; c < kCentroids; ++c) {
        float bin = (top - sims[c]) * scale;
        bin = bin > 0.0f ? bin : 0.0f;
        bins[c] = static_cast<uint8_t>(static_cast<int32_t>(bin < kBins - 1 ? bin : kBins - 1));
    }
    int32_t held[kBins] = {};
    for (int c = 0; c < kCentroids; ++c) held[bins[c]] += counts[c];
    for (int c = 0; c < kCentroids; ++c) points[c] = 0;
    // A limit gives a point to the centroids of all bins up to the one that it falls into.
    int bin = 0, cuts = 0;
    int32_t ahead = 0, keys_ahead[kBins];
    uint8_t cut[kBins];
    for (int64_t t = 0; t < tiers; ++t) {
        if (limits[t] <= 0) continue;
        while (bin < kBins - 1 && ahead + held[bin] < limits[t]) ahead += held[bin++];
        const uint8_t own = static_cast<uint8_t>(bin);
        for (int c = 0; c < kCentroids; ++c) points[c] += bins[c] <= own;
        if (cuts == 0 || cut[cuts - 1] != own) cut[cuts] = own, keys_ahead[cuts++] = ahead;
    }
    for (int i = 0; i < cuts; ++i) {
        sort_bin<I>(cut[i], bins, sims, counts, keys_ahead[i], limits, tiers, points);
    }
}

// The scan for any processor: a table entry holds the points of up to eight heads, a byte each, so
// that one addition serves them all. Sums stay below 255.
struct ByteScan {
    static int64_t width(int64_t heads) { return heads <= 2 ? heads : heads <= 4 ? 4 : 8; }

    static int64_t groups(int64_t heads) { return (heads + 7) / 8; }

    static int64_t packed_bytes(const PointTables &tables) {
        return groups(tables.heads) * tables.bytes * 256 * width(tables.heads);
    }

    static void pack(const PointTables &tables) {
        const int64_t wide = width(tables.heads), entries = tables.bytes * 256;
        uint8_t *to = reinterpret_cast<uint8_t *>(tables.packed);
        for (int64_t group = 0; group < groups(tables.heads); ++group) {
            for (int64_t lane = 0; lane < wide; ++lane) {
                const int64_t head = 8 * group + lane;
                for (int64_t e = 0; e < entries; ++e) {
                    to[(group * entries + e) * wide + lane] =
                        head < tables.heads ? tables.points[head * entries + e] : 0;
                }
            }
        }
    }

    template <class Entry>
    static void sums(const PointTables &tables, const uint8_t *sign, int64_t first, int64_t last,
                     uint8_t *scores) {
        for (int64_t group = 0; group < groups(tables.heads); ++group) {
            const Entry *table =
                reinterpret_cast<const Entry *>(tables.packed) + group * tables.bytes * 256;
            for (int64_t i = first; i < last; ++i) {
                const uint8_t *token = sign + i * tables.bytes;
                Entry sum = 0;
                for (int64_t s = 0; s < tables.bytes; ++s) {
                    sum = static_cast<Entry>(sum + table[s * 256 + token[s]]);
                }
                uint8_t most = group == 0 ? 0 : scores[i];
                for (size_t lane = 0; lane < sizeof(Entry); ++lane) {
                    const int points = static_cast<uint8_t>(sum >> 8 * lane);
                    const int left = points - tables.drops[8 * group + lane];
                    most = left > most ? static_cast<uint8_t>(left) : most;
                }
                scores[i] = most;
            }
        }
    }

    static void scan(const PointTables &tables, const uint8_t *sign, const uint8_t *valid,
                     int64_t first, int64_t last, uint8_t *scores) {
        auto *run = width(tables.heads) == 1   ? sums<uint8_t>
                    : width(tables.heads) == 2 ? sums<uint16_t>
                    : width(tables.heads) == 4 ? sums<uint32_t>
                                               : sums<uint64_t>;
        run(tables, sign, first, last, scores);
        for (int64_t i = first; i < last; ++i) scores[i] = valid[i] ? scores[i] + 1 : 0;
    }
};

template <class I> int64_t count_scores(const uint8_t *scores, int64_t end, uint8_t level) {
    int64_t count = 0;
    for (int64_t i = 0; i < end; i += 64) {
        count += __builtin_popcountll(I::at_least64(scores + i, level));
    }
    return count;
}

template <class I>
int64_t candidates(const uint8_t *scores, int64_t n, int64_t count, int32_t *ids) {
    const int64_t end = (n + 63) / 64 * 64;
    // The lowest score that is taken, and how many reach it.
    int low = 1, high = 256;
    int64_t at_least = -1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        const int64_t reached = count_scores<I>(scores, end, static_cast<uint8_t>(middle));
        if (reached >= count) {
            low = middle, at_least = reached;
        } else {
            high = middle;
        }
    }
    if (at_least < 0) at_least = count_scores<I>(scores, end, 1);
    // The first ones of those on it are left out.
    int64_t surplus = std::max<int64_t>(at_least - count, 0), found = 0;
    for (int64_t i = 0; i < end; i += 64) {
        uint64_t chosen =
            low == 255 ? 0 : I::at_least64(scores + i, static_cast<uint8_t>(low + 1));
        uint64_t equal = I::at_least64(scores + i, static_cast<uint8_t>(low)) & ~chosen;
        const int64_t left_out = std::min<int64_t>(surplus, __builtin_popcountll(equal));
        surplus -= left_out;
        if (surplus > 0) equal = 0;
        for (int64_t s = 0; s < left_out && equal != 0; ++s) equal &= equal - 1;
        chosen |= equal;
        if (chosen != 0) found += I::put_places(chosen, static_cast<int32_t>(i), ids + found);
    }
    return found;
}

// The places of the bits of `chosen`, from `base` on; returns how many.
inline int64_t put_places_one_by_one(uint64_t chosen, int32_t base, int32_t *to) {
    int64_t count = 0;
    for (; chosen != 0; chosen &= chosen - 1) to[count++] = base + __builtin_ctzll(chosen);
    return count;
}

constexpr int64_t kMostWeights = 128;  // of a key: 1,024 coordinates, eight to a subspace
constexpr int64_t kCandidatesAhead = 24;

inline void prefetch_codes(const ParisCodes &codes, int64_t id) {
    const auto ask = [](const uint8_t *byte) { ask_for(reinterpret_cast<const char *>(byte)); };
    ask(codes.sign + id * codes.dim / 8);
    const uint8_t *end = codes.magnitude(id + 1);
    for (const uint8_t *line = codes.magnitude(id); line < end; line += kLine) ask(line);
    ask(end - 1);
}

// Estimates of `H` heads' inner products with `R` candidates, H * R at most 4.
template <class I, int H, int R>
void estimate(const Rerank &work, int64_t first_head, int64_t place, const float *weights) {
    using V = typename I::V;
    const ParisCodes &codes = work.codes;
    const int64_t dim = codes.dim, bytes = dim / 8;
    const float *queries = work.queries + first_head * dim;
    const uint8_t *sign[R], *magnitude[R];
    for (int i = 0; i < R; ++i) {
        const int64_t at = place + i < work.last ? place + i : work.last - 1;
        sign[i] = codes.sign + work.ids[at] * bytes;
        magnitude[i] = codes.magnitude(work.ids[at]);
    }
    V sums[4];
    HFK_UNROLL for (int i = 0; i < 4; ++i) sums[i] = I::set1(0.0f);
    int64_t d = 0;
    constexpr int step = I::lanes < 8 ? 8 : I::lanes;
    for (; d + step <= dim; d += step) {
        HFK_UNROLL for (int i = 0; i < R; ++i) {
            V values[step / I::lanes];
            I::decode(magnitude[i] + 3 * d / 8, sign[i] + d / 8,
                      weights + i * kMostWeights + d / 8, work.levels, values);
            HFK_UNROLL for (int v = 0; v < step / I::lanes; ++v) {
                HFK_UNROLL for (int g = 0; g < H; ++g) {
                    const V q = I::load(queries + g * dim + d + v * I::lanes);
                    sums[i * H + g] = I::fma(values[v], q, sums[i * H + g]);
                }
            }
        }
    }
    float results[4];
    I::store_sums(results, sums[0], sums[1], sums[2], sums[3]);
    for (int i = 0; i < R && place + i < work.last; ++i) {
        for (int g = 0; g < H; ++g) {
            float *to = work.out + (first_head + g) * work.stride + place + i;
            *to = results[i * H + g];
            // Rotated vectors of one sign byte are shorter than the widest vectors.
            for (int64_t j = d; j < dim; ++j) {
                const uint32_t word = magnitude[i][3 * (j / 8)] |
                                      magnitude[i][3 * (j / 8) + 1] << 8 |
                                      magnitude[i][3 * (j / 8) + 2] << 16;
                const float level = work.levels[word >> 3 * (j % 8) & 7] *
                                    weights[i * kMostWeights + j / 8];
                *to += queries[g * dim + j] * (sign[i][j / 8] >> j % 8 & 1 ? level : -level);
            }
        }
    }
}

template <class I, int R>
void rerank_some(const Rerank &work, int64_t first_head, int64_t heads) {
    const ParisCodes &codes = work.codes;
    const int64_t count = codes.dim / 8;
    float weights[R * kMostWeights];
    for (int64_t place = work.first; place < work.last; place += R) {
        for (int i = 0; i < R; ++i) {
            const int64_t at = std::min(place + i, work.last - 1);
            prefetch_codes(codes, work.ids[std::min(at + kCandidatesAhead, work.last - 1)]);
            const uint8_t *from = codes.weight(work.ids[at]);
            Half halves[kMostWeights + I::lanes];
            for (int64_t s = 0; s < count; ++s) halves[s].bits = static_cast<uint16_t>(from[s] << 7);
            for (int64_t s = 0; s < count; s += I::lanes) {
                I::store(weights + i * kMostWeights + s, I::load(halves + s));
            }
        }
        switch (heads) {
        case 1:
            estimate<I, 1, R>(work, first_head, place, weights);
            break;
        case 2:
            if constexpr (R <= 2) estimate<I, 2, R>(work, first_head, place, weights);
            break;
        case 3:
            if constexpr (R == 1) estimate<I, 3, R>(work, first_head, place, weights);
            break;
        default:
            if constexpr (R == 1) estimate<I, 4, R>(work, first_head, place, weights);
        }
    }
}

// Inner products become scores.
template <class I> void finish_estimates(const Rerank &work) {
    for (int64_t g = 0; g < work.heads; ++g) {
        float *scores = work.out + g * work.stride;
        const float *offsets = work.offsets + g * work.offset_stride;
        int64_t i = work.first;
        for (; i < work.last; ++i) scores[i] += offsets[work.ids[i] >> work.block_bits];
        i = work.first;
        float some[I::lanes];
        for (; i < work.last; i += I::lanes) {
            const int64_t count = std::min<int64_t>(I::lanes, work.last - i);
            std::copy(scores + i, scores + i + count, some);
            std::fill(some + count, some + I::lanes, 0.0f);
            finish_scores<I>(some, I::lanes, work.scale, work.softcap);
            std::copy(some, some + count, scores + i);
        }
    }
}

template <class I> void rerank(const Rerank &work) {
    for (int64_t g = 0; g < work.heads; g += 4) {
        const int64_t heads = std::min<int64_t>(4, work.heads - g);
        auto *run = heads == 1 ? rerank_some<I, 4> : heads == 2 ? rerank_some<I, 2>
                                                                : rerank_some<I, 1>;
        run(work, g, heads);
    }
    finish_estimates<I>(work);
}

} // namespace

// `Scan` and `rerank` may be those for any instruction set: ByteScan and rerank<I>.
#define HFK_DEFINE_KERNEL(name, I, Scan, rerank)                                                   \
    const Kernel name = {Workspace::floats,       Entry<I>::attend_any,                            \
                         Entry<I>::score_any,     SelectEntry<I>::dense_scores_any,                \
                         SelectEntry<I>::proxy_scores_any,                                         \
                         Entry<I>::exp_all,       sign_points<I>,                                    \
                         similar_points,                                                           \
                         Scan::packed_bytes,      Scan::pack,                                      \
                         Scan::scan,              candidates<I>,                                   \
                         rerank,                  relevance<I>,                                    \
                         best<I>,                                                                  \
                         prompt_any<I>,                                                            \
                         CodeWork<I>::encode,     CodeWork<I>::decode,                             \
                         ProductWork<I>::run}
