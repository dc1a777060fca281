// ParisKV's estimates with AVX-512: 64 coordinates of a candidate at a time.
#pragma once

#include "avx512.h"

namespace {

// The places of 64 coordinates' levels among sixteen, the lower half of them negative: bit 3 of the
// sign, the others of the code. Lane j of a vector has those of coordinates 4j to 4j + 3.
class ShiftedPlaces {
  public:
    ShiftedPlaces(const uint8_t *magnitude, const uint8_t *sign) {
        // Four codes are twelve bits, which begin at bit 0, 12, 8 or 4 of a word.
        const __m512i words = _mm512_setr_epi32(
            0x00010000, 0x00010000, 0x00020001, 0x00030002, 0x00040003, 0x00040003, 0x00050004,
            0x00060005, 0x00070006, 0x00070006, 0x00080007, 0x00090008, 0x000a0009, 0x000a0009,
            0x000b000a, 0x000c000b);
        const __m512i starts = _mm512_setr_epi32(0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4);
        const __m256i raw = _mm256_maskz_loadu_epi8(0xffffff, magnitude);
        const __m512i lines = _mm512_permutexvar_epi16(words, _mm512_castsi256_si512(raw));
        codes_ = _mm512_srlv_epi32(lines, starts);
        int32_t halves[2];
        __builtin_memcpy(halves, sign, sizeof halves);
        const __m512i all = _mm512_inserti64x4(_mm512_set1_epi32(halves[0]),
                                               _mm256_set1_epi32(halves[1]), 1);
        const __m512i fourths =
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        signs_ = _mm512_srlv_epi32(all, fourths);
    }

    // The place for coordinate `i` of each lane; bits above the low four do not matter.
    __m512i at(int i) const {
        const __m512i own = _mm512_slli_epi32(signs_, 3 - i), code = _mm512_srli_epi32(codes_, 3 * i);
        return _mm512_ternarylogic_epi32(_mm512_set1_epi32(8), own, code, 0xca);
    }

  private:
    __m512i codes_, signs_;
};

// Vectors whose dimension is a multiple of 64; others go to the code for AVX-512. The four
// coordinates of a lane are all of one subspace: they are looked up one after the other, and their
// sum is weighted once.
template <class Places> class BlockRerank {
  public:
    static void rerank(const Rerank &work) {
        const ParisCodes &codes = work.codes;
        if (codes.dim % kBlock != 0) return ::rerank<Avx512>(work);
        for (int64_t g = 0; g < work.heads; g += kHeads) {
            alignas(64) float queries[kHeads * kMostDim];
            const int64_t heads = std::min<int64_t>(kHeads, work.heads - g);
            for (int64_t h = 0; h < heads; ++h) {
                turn(work.queries + (g + h) * codes.dim, codes.dim, queries + h * codes.dim);
            }
            choose(codes.dim, heads)(work, queries, g);
        }
        finish_estimates<Avx512>(work);
    }

  private:
    static constexpr int kBlock = 64, kHeads = 4, kMostDim = 1024;

    typedef void (*Run)(const Rerank &work, const float *queries, int64_t first_head);

    static Run choose(int64_t dim, int64_t heads) {
        return dim == 64    ? choose<1>(heads)
               : dim == 128 ? choose<2>(heads)
               : dim == 256 ? choose<4>(heads)
                            : choose<0>(heads);
    }

    // `Blocks`: of a vector; 0 for any number.
    template <int Blocks> static Run choose(int64_t heads) {
        return heads == 1   ? estimate_all<Blocks, 1>
               : heads == 2 ? estimate_all<Blocks, 2>
               : heads == 3 ? estimate_all<Blocks, 3>
                            : estimate_all<Blocks, 4>;
    }

    // The four coordinates of each lane, one after the other.
    static void turn(const float *from, int64_t dim, float *to) {
        for (int64_t d = 0; d < dim; d += kBlock) {
            for (int64_t i = 0; i < kBlock; ++i) to[d + i % 4 * 16 + i / 4] = from[d + i];
        }
    }

    template <int Blocks, int Heads>
    static void estimate_all(const Rerank &work, const float *queries, int64_t first_head) {
        // Few heads leave room in four sums for more than one candidate.
        constexpr int kRows = Heads <= 2 ? 4 : 1;
        float both[16];
        for (int i = 0; i < 8; ++i) both[i] = -work.levels[i], both[8 + i] = work.levels[i];
        const __m512 levels = _mm512_loadu_ps(both);
        float *out = work.out + first_head * work.stride;
        int64_t place = work.first;
        for (; place + kRows <= work.last; place += kRows) {
            estimate<Blocks, Heads, kRows>(work, queries, levels, place, out + place);
        }
        for (; place < work.last; ++place) {
            estimate<Blocks, Heads, 1>(work, queries, levels, place, out + place);
        }
    }

    // Sum `g * Rows + r` is of head g and the candidate at `place + r`.
    template <int Blocks, int Heads, int Rows>
    static void estimate(const Rerank &work, const float *queries, __m512 levels, int64_t place,
                         float *to) {
        const ParisCodes &codes = work.codes;
        __m512 sums[8];
        HFK_UNROLL for (int i = 0; i < 8; ++i) sums[i] = _mm512_setzero_ps();
        HFK_UNROLL for (int r = 0; r < Rows; ++r) {
            const int64_t far = std::min(place + r + kCandidatesAhead, work.last - 1);
            prefetch_codes(codes, work.ids[far]);
            const int64_t id = work.ids[place + r];
            const int64_t blocks = Blocks == 0 ? codes.dim / kBlock : Blocks;
            const uint8_t *sign = codes.sign + id * 8 * blocks;
            const uint8_t *magnitude = codes.magnitude(id), *weight = codes.weight(id);
            const auto add = [&](int64_t b) {
                const Places places(magnitude + 24 * b, sign + 8 * b);
                const __m512 own = weights(weight + 8 * b);
                __m512 values[4];
                HFK_UNROLL for (int i = 0; i < 4; ++i) {
                    values[i] = _mm512_permutexvar_ps(places.at(i), levels);
                }
                HFK_UNROLL for (int g = 0; g < Heads; ++g) {
                    const float *query = queries + (g * blocks + b) * kBlock;
                    __m512 sum = _mm512_mul_ps(values[0], _mm512_load_ps(query));
                    HFK_UNROLL for (int i = 1; i < 4; ++i) {
                        sum = _mm512_fmadd_ps(values[i], _mm512_load_ps(query + 16 * i), sum);
                    }
                    __m512 &total = sums[g * Rows + r];
                    total = b == 0 ? _mm512_mul_ps(sum, own) : _mm512_fmadd_ps(sum, own, total);
                }
            };
            if constexpr (Blocks == 0) {
                for (int64_t b = 0; b < blocks; ++b) add(b);
            } else {
                HFK_UNROLL for (int b = 0; b < Blocks; ++b) add(b);
            }
        }
        const __m128 first = Avx512::sums(sums[0], sums[1], sums[2], sums[3]);
        if constexpr (Rows == 4) {
            _mm_storeu_ps(to, first);
            if constexpr (Heads == 2) {
                _mm_storeu_ps(to + work.stride, Avx512::sums(sums[4], sums[5], sums[6], sums[7]));
            }
        } else {
            for (int g = 0; g < Heads; ++g) to[g * work.stride] = first[g];
        }
    }

    // Weights of the subspaces of 64 coordinates, each for the lanes that it covers.
    static __m512 weights(const uint8_t *from) {
        __m128i own = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
        own = _mm_unpacklo_epi8(own, own);
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(own), 7));
    }
};

} // namespace
