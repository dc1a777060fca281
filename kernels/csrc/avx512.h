// x86 with AVX-512 F, BW, DQ and VL: sixteen floats.
#pragma once

#include <immintrin.h>

#include "attend_kernel.h"

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
    static void store_sums(float *to, V a, V b, V c, V d) {
        const V ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
        const V cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
        const V lanes4 = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
        const __m256 lanes2 =
            _mm512_castps512_ps256(lanes4) + _mm512_extractf32x8_ps(lanes4, 1);
        _mm_storeu_ps(to, _mm256_castps256_ps128(lanes2) + _mm256_extractf128_ps(lanes2, 1));
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
