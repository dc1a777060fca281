// AVX-512 with BF16 and VBMI, emulated on a processor with AVX2: SIMDe, and what its version 0.7.4 lacks.
// Kernels that are compiled with this header give the right answers, slowly. Products of bf16 numbers
// below 2^-126 are not 0 here, as they are on a processor. See .ci/avx512.
#pragma once

#include <cstdint>
#include <cstring>

#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {

typedef int32_t Words __attribute__((vector_size(64)));

template <class From, class To> To bits(const From &from) {
    static_assert(sizeof(From) == sizeof(To), "numbers of the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline __m512 cvtepi32_ps(__m512i x) {
    return __builtin_convertvector(bits<__m512i, Words>(x), __m512);
}

inline __m512i cvtepi8_epi32(__m128i x) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    return bits<Words, __m512i>(__builtin_convertvector(bits<__m128i, Bytes>(x), Words));
}

inline __m512i cvtepu8_epi64(__m128i x) {
    struct {
        __m256i low, high;
    } both = {_mm256_cvtepu8_epi64(x), _mm256_cvtepu8_epi64(_mm_srli_si128(x, 4))};
    return bits<decltype(both), __m512i>(both);
}

inline __m512i cvtepu16_epi32(__m256i x) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    return bits<Words, __m512i>(__builtin_convertvector(bits<__m256i, Halves>(x), Words));
}

inline __m512 cvtph_ps(__m256i x) {
    struct {
        __m256 low, high;
    } both = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
    return bits<decltype(both), __m512>(both);
}

// Rounded to the nearest, ties to even, as the instruction rounds: denormals are zeros.
inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
    uint16_t to[32];
    for (int i = 0; i < 32; ++i) {
        const float number = i < 16 ? low[i] : high[i - 16];
        const uint32_t own = bits<float, uint32_t>(number), size = own & 0x7fffffffu;
        const uint32_t near = own + 0x7fffu + (own >> 16 & 1u);
        const uint32_t kept = size > 0x7f800000u   ? own | 0x400000u
                              : size < 0x00800000u ? own & 0x80000000u
                                                   : near;
        to[i] = static_cast<uint16_t>(kept >> 16);
    }
    return bits<uint16_t[32], __m512bh>(to);
}

inline float reduce_max_ps(__m512 x) {
    float most = x[0];
    for (int i = 1; i < 16; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

inline __m256 extractf32x8_ps(__m512 x, int half) {
    __m256 to;
    std::memcpy(&to, reinterpret_cast<const char *>(&x) + half * sizeof to, sizeof to);
    return to;
}

inline __m512 permute_ps(__m512 x, int order) {
    __m512 to;
    for (int i = 0; i < 16; ++i) to[i] = x[i / 4 * 4 + (order >> 2 * (i % 4) & 3)];
    return to;
}

inline __m512 shuffle_f32x4(__m512 a, __m512 b, int order) {
    __m512 to;
    for (int i = 0; i < 16; ++i) to[i] = (i < 8 ? a : b)[(order >> 2 * (i / 4) & 3) * 4 + i % 4];
    return to;
}

inline __m512d i32gather_pd(__m256i places, const void *from, int scale) {
    const auto at = bits<__m256i, __attribute__((vector_size(32))) int32_t>(places);
    __m512d to;
    for (int64_t i = 0; i < 8; ++i) {
        double number;
        std::memcpy(&number, static_cast<const char *>(from) + int64_t{scale} * at[i], sizeof number);
        to[i] = number;
    }
    return to;
}

inline __m512i i64gather_epi64(__m512i places, const void *from, int scale) {
    int64_t to[8];
    for (int i = 0; i < 8; ++i) {
        std::memcpy(to + i, static_cast<const char *>(from) + scale * places[i], sizeof *to);
    }
    return bits<int64_t[8], __m512i>(to);
}

// Elements `E` whose bit is set are read, others are 0 and may lie outside of all memory.
template <class V, class E> V maskz_loadu(uint64_t mask, const void *from) {
    constexpr int count = sizeof(V) / sizeof(E);
    E to[count] = {};
    for (int i = 0; i < count; ++i) {
        if ((mask >> i & 1) != 0) std::memcpy(to + i, static_cast<const E *>(from) + i, sizeof(E));
    }
    return bits<E[count], V>(to);
}

inline void mask_storeu_epi8(void *to, uint64_t mask, __m512i x) {
    for (int i = 0; i < 64; ++i) {
        if ((mask >> i & 1) == 0) continue;
        std::memcpy(static_cast<char *>(to) + i, reinterpret_cast<const char *>(&x) + i, 1);
    }
}

} // namespace emulated

#undef _mm256_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi8
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi64
#undef _mm512_cvtne2ps_pbh
#undef _mm512_cvtph_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_i32gather_pd
#undef _mm512_i64gather_epi64
#undef _mm512_mask_storeu_epi8
#undef _mm512_maskz_loadu_epi8
#undef _mm512_maskz_loadu_ps
#undef _mm512_permute_ps
#undef _mm512_reduce_max_ps
#undef _mm512_shuffle_f32x4
#undef _mm_maskz_loadu_epi8

#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu<__m256i, int16_t>
#define _mm256_maskz_loadu_epi8 emulated::maskz_loadu<__m256i, int8_t>
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi64 emulated::cvtepu8_epi64
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_i32gather_pd emulated::i32gather_pd
#define _mm512_i64gather_epi64 emulated::i64gather_epi64
#define _mm512_mask_storeu_epi8 emulated::mask_storeu_epi8
#define _mm512_maskz_loadu_epi8 emulated::maskz_loadu<__m512i, int8_t>
#define _mm512_maskz_loadu_ps emulated::maskz_loadu<__m512, float>
#define _mm512_permute_ps emulated::permute_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#define _mm_maskz_loadu_epi8 emulated::maskz_loadu<__m128i, int8_t>
