// x86 with AVX-512 F, BW, DQ and VL: sixteen floats.
#pragma once

#include <immintrin.h>

#include "paris_kernel.h"

namespace {

struct Avx512 {
    typedef __m512 V;

    template <class T> static constexpr bool multiplies = false;
    static constexpr bool few_registers = false;
    static constexpr int lanes = 16;
    static constexpr int heads = 4;   // 16 sums, 4 keys and a query in 32 registers
    static constexpr int columns = 4;

    static V set1(float x) { return _mm512_set1_ps(x); }
    static V load(const float *from) { return _mm512_loadu_ps(from); }
    static V load(const Bf16 *from) { return widen(_mm256_loadu_si256(to_vector(from))); }
    static V load(const Half *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(to_vector(from))); }

    static V load(const Int8 *from) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }

    static void load_pair(const float *from, V &a, V &b) { a = load(from), b = load(from + lanes); }
    static void load_pair(const Half *from, V &a, V &b) { a = load(from), b = load(from + lanes); }

    static void load_pair(const Bf16 *from, V &a, V &b) {
        const __m512i bits = _mm512_loadu_si512(from);
        a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    }

    static V load_some(const float *from, int count) {
        return _mm512_maskz_loadu_ps(first(count), from);
    }

    static V load_some(const Bf16 *from, int count) {
        return widen(_mm256_maskz_loadu_epi16(first(count), from));
    }

    static V load_some(const Half *from, int count) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from));
    }

    static V load_some(const Int8 *from, int count) {
        const __m128i bytes = _mm_maskz_loadu_epi8(first(count), from);
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }

    // Numbers of `lanes / 2` points of a grid [4^bits, 2]. With 2 bits it lies in two registers.
    static V pairs_at(const uint8_t *codes, const float *grid, int bits) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes));
        if (bits == 2) {
            const __m512d low = _mm512_castps_pd(load(grid));
            const __m512d high = _mm512_castps_pd(load(grid + lanes));
            const __m512i places = _mm512_cvtepu8_epi64(bytes);
            return _mm512_castpd_ps(_mm512_permutex2var_pd(low, places, high));
        }
        return _mm512_castpd_ps(_mm512_i32gather_pd(_mm256_cvtepu8_epi32(bytes), grid, 8));
    }

    // Number i is x[i ^ H].
    template <int H> static V swapped(V x) {
        if constexpr (H == 1) return _mm512_permute_ps(x, 0xb1);
        if constexpr (H == 2) return _mm512_permute_ps(x, 0x4e);
        return _mm512_shuffle_f32x4(x, x, H == 4 ? 0xb1 : 0x4e);
    }

    // Numbers of a and b in turn: those of the lower halves, and of the upper ones.
    static void zip(V a, V b, V &low, V &high) {
        const __m512i lower =
            _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        low = _mm512_permutex2var_ps(a, lower, b);
        high = _mm512_permutex2var_ps(a, _mm512_add_epi32(lower, _mm512_set1_epi32(8)), b);
    }

    static void store(float *to, V x) { _mm512_storeu_ps(to, x); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V abs(V x) { return _mm512_abs_ps(x); }

    static V copy_sign(V size, V sign) {
        return _mm512_or_ps(size, _mm512_and_ps(sign, set1(-0.0f)));
    }

    static V where_less(V a, V b, V yes, V no) {
        return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
    }

    // 2^n of the n in the low bits of `shifted`.
    static V power_of_two(V shifted) {
        const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
    }

    static float largest(V x) { return _mm512_reduce_max_ps(x); }

    // Adds within the four lanes of 128 bits first, so that one vector holds all four sums.
    static void store_sums(float *to, V a, V b, V c, V d) { _mm_storeu_ps(to, sums(a, b, c, d)); }

    static __m128 sums(V a, V b, V c, V d) {
        const V ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
        const V cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
        const V lanes4 = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
        const __m256 lanes2 =
            _mm512_castps512_ps256(lanes4) + _mm512_extractf32x8_ps(lanes4, 1);
        return _mm256_castps256_ps128(lanes2) + _mm256_extractf128_ps(lanes2, 1);
    }

    // Bit i says whether number i is at least `limit`.
    static uint32_t at_least16(const float *from, float limit) {
        return _mm512_cmp_ps_mask(load(from), set1(limit), _CMP_GE_OQ);
    }

    static uint64_t at_least64(const uint8_t *from, uint8_t limit) {
        return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(from),
                                      _mm512_set1_epi8(static_cast<char>(limit)));
    }

    // Writes up to 16 places more than it returns.
    static int64_t put_places(uint64_t chosen, int32_t base, int32_t *to) {
        const __m512i places =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        int64_t count = 0;
        HFK_UNROLL for (int quarter = 0; quarter < 4; ++quarter) {
            const __mmask16 bits = static_cast<__mmask16>(chosen >> 16 * quarter);
            const __m512i own = _mm512_add_epi32(places, _mm512_set1_epi32(base + 16 * quarter));
            _mm512_storeu_si512(to + count, _mm512_maskz_compress_epi32(bits, own));
            count += __builtin_popcount(bits);
        }
        return count;
    }

    // Sixteen coordinates: level times weight, with its sign.
    static void decode(const uint8_t *magnitude, const uint8_t *sign, const float *weights,
                       const float *levels, V (&values)[1]) {
        const int low = magnitude[0] | magnitude[1] << 8 | magnitude[2] << 16;
        const int high = magnitude[3] | magnitude[4] << 8 | magnitude[5] << 16;
        const __m512i words = _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
        const __m512i shifts =
            _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 3, 6, 9, 12, 15, 18, 21);
        // The table holds the eight levels twice: bits above the low three don't matter.
        const __m512 table = _mm512_broadcast_f32x8(_mm256_loadu_ps(levels));
        const V level = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table);
        const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(weights));
        const V own = _mm512_castps128_ps512(_mm_castsi128_ps(two));
        const V value = level * _mm512_permutexvar_ps(spread, own);
        uint16_t positive;
        __builtin_memcpy(&positive, sign, sizeof positive);
        values[0] = _mm512_mask_xor_ps(value, static_cast<__mmask16>(~positive), value, set1(-0.0f));
    }

  private:
    static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1); }

    template <class T> static const __m256i *to_vector(const T *from) {
        return reinterpret_cast<const __m256i *>(from);
    }

    static V widen(__m256i bits) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
};

} // namespace
