// Vectors of bytes with AVX-512 for ParisKV's scan.
#pragma once

#include "avx512.h"
#include "nibble_scan.h"

namespace {

struct Bytes512 {
    typedef __m512i V;

    static V load(const void *from) { return _mm512_loadu_si512(from); }
    static void store(void *to, V x) { _mm512_storeu_si512(to, x); }
    static V zero() { return _mm512_setzero_si512(); }
    static V add(V a, V b) { return _mm512_add_epi8(a, b); }
    static V sub(V a, V b) { return _mm512_sub_epi8(a, b); }
    // A difference below 0 becomes 0.
    static V less(V a, uint8_t b) {
        return _mm512_subs_epu8(a, _mm512_set1_epi8(static_cast<char>(b)));
    }
    static V max(V a, V b) { return _mm512_max_epu8(a, b); }
    static V interleave_low(V a, V b) { return _mm512_unpacklo_epi8(a, b); }
    static V interleave_high(V a, V b) { return _mm512_unpackhi_epi8(a, b); }

    // The upper half of each byte, as its lower one; and the lower half as the upper one.
    static V lower(V x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
    static V raise(V x) {
        return _mm512_andnot_si512(_mm512_set1_epi8(15), _mm512_slli_epi16(x, 4));
    }

    // One more where a mark is set, 0 elsewhere.
    static V increase(V x, V marks) {
        return _mm512_maskz_add_epi8(_mm512_test_epi8_mask(marks, marks), x, _mm512_set1_epi8(1));
    }

    template <class Lane> static V lanes(const Lane &lane) {
        const V x = _mm512_inserti32x4(_mm512_castsi128_si512(lane(0)), lane(1), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(x, lane(2), 2), lane(3), 3);
    }
};

// Looks up 64 bytes in a table of 256, by a shuffle for each 16 entries.
class ShuffledTable {
  public:
    explicit ShuffledTable(const char *from) : from_(from) {}

    __m512i at(__m512i bytes) const {
        const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
        __mmask64 bit[4]; // the upper four of each byte
        HFK_UNROLL for (int i = 0; i < 4; ++i) {
            bit[i] = _mm512_movepi8_mask(_mm512_slli_epi16(bytes, 3 - i));
        }
        __m512i parts[8];
        HFK_UNROLL for (int i = 0; i < 8; ++i) {
            const __m512i even = _mm512_shuffle_epi8(sixteen(2 * i), low);
            parts[i] = _mm512_mask_shuffle_epi8(even, bit[0], sixteen(2 * i + 1), low);
        }
        HFK_UNROLL for (int step = 1; step < 4; ++step) {
            HFK_UNROLL for (int i = 0; i < 8 >> step; ++i) {
                parts[i] = _mm512_mask_blend_epi8(bit[step], parts[2 * i], parts[2 * i + 1]);
            }
        }
        return parts[0];
    }

  private:
    // All four lanes have the same sixteen entries.
    __m512i sixteen(int part) const {
        return _mm512_broadcast_i32x4(
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(from_ + 16 * part)));
    }

    const char *from_;
};

} // namespace
