// x86 with AVX2, FMA and F16C: eight floats. Compiled with these instructions, called where they are.
#include <immintrin.h>

#include "attend_kernel.h"

namespace {

struct Avx2 {
    typedef __m256 V;

    template <class T> static constexpr bool multiplies = false;
    static constexpr bool few_registers = true;
    static constexpr int lanes = 8;
    static constexpr int heads = 2;   // 8 sums, 4 keys and a query in 16 registers
    static constexpr int columns = 4;

    static V set1(float x) { return _mm256_set1_ps(x); }
    static V load(const float *from) { return _mm256_loadu_ps(from); }

    static V load(const Bf16 *from) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }

    static V load(const Half *from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }

    static void load_pair(const float *from, V &a, V &b) { a = load(from), b = load(from + lanes); }
    static void load_pair(const Half *from, V &a, V &b) { a = load(from), b = load(from + lanes); }

    static void load_pair(const Bf16 *from, V &a, V &b) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
        b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
    }

    template <class T> static V load_some(const T *from, int count) {
        T all[lanes] = {};
        for (int i = 0; i < count; ++i) all[i] = from[i];
        return load(all);
    }

    static void store(float *to, V x) { _mm256_storeu_ps(to, x); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static V max(V a, V b) { return _mm256_max_ps(a, b); }
    static V abs(V x) { return _mm256_andnot_ps(set1(-0.0f), x); }

    static V copy_sign(V size, V sign) {
        return _mm256_or_ps(size, _mm256_and_ps(sign, set1(-0.0f)));
    }

    static V where_less(V a, V b, V yes, V no) {
        return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }

    // 2^n of the n in the low bits of `shifted`.
    static V power_of_two(V shifted) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
    }

    static float largest(V x) {
        __m128 top = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        top = _mm_max_ps(top, _mm_movehl_ps(top, top));
        return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
    }

    static void store_sums(float *to, V a, V b, V c, V d) {
        const V sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
};

} // namespace

HFK_DEFINE_KERNEL(avx2_kernel, Avx2);
