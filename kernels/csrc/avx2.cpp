// x86 with AVX2, FMA and F16C: eight floats. Compiled with these instructions, called where they are.
#include <immintrin.h>

#include "nibble_scan.h"

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

    static V load(const Int8 *from) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
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

    // Numbers of `lanes / 2` points of a grid [*, 2].
    static V pairs_at(const uint8_t *codes, const float *grid, int) {
        // A pair is loaded as one double.
        const double *points = reinterpret_cast<const double *>(grid);
        const auto two = [points](size_t first, size_t second) {
            return _mm_loadh_pd(_mm_load_sd(points + first), points + second);
        };
        const __m128d low = two(codes[0], codes[1]), high = two(codes[2], codes[3]);
        return _mm256_castpd_ps(_mm256_set_m128d(high, low));
    }

    // Number i is x[i ^ H].
    template <int H> static V swapped(V x) {
        if constexpr (H == 1) return _mm256_permute_ps(x, 0xb1);
        if constexpr (H == 2) return _mm256_permute_ps(x, 0x4e);
        return _mm256_permute2f128_ps(x, x, 1);
    }

    // Numbers of a and b in turn: those of the lower halves, and of the upper ones.
    static void zip(V a, V b, V &low, V &high) {
        const V even = _mm256_unpacklo_ps(a, b), odd = _mm256_unpackhi_ps(a, b);
        low = _mm256_permute2f128_ps(even, odd, 0x20);
        high = _mm256_permute2f128_ps(even, odd, 0x31);
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

    // Bit i says whether number i is at least `limit`.
    static uint32_t at_least16(const float *from, float limit) {
        const V level = set1(limit);
        const int low = _mm256_movemask_ps(_mm256_cmp_ps(load(from), level, _CMP_GE_OQ));
        const int high = _mm256_movemask_ps(_mm256_cmp_ps(load(from + 8), level, _CMP_GE_OQ));
        return static_cast<uint32_t>(low | high << 8);
    }

    static uint64_t at_least64(const uint8_t *from, uint8_t limit) {
        const __m256i level = _mm256_set1_epi8(static_cast<char>(limit));
        const auto bits = [&level](const uint8_t *bytes) {
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
            const __m256i reached = _mm256_cmpeq_epi8(_mm256_max_epu8(x, level), x);
            return static_cast<uint32_t>(_mm256_movemask_epi8(reached));
        };
        return bits(from) | static_cast<uint64_t>(bits(from + 32)) << 32;
    }

    static int64_t put_places(uint64_t chosen, int32_t base, int32_t *to) {
        return put_places_one_by_one(chosen, base, to);
    }

    // Eight coordinates: level times weight, with its sign.
    static void decode(const uint8_t *magnitude, const uint8_t *sign, const float *weights,
                       const float *levels, V (&values)[1]) {
        const int word = magnitude[0] | magnitude[1] << 8 | magnitude[2] << 16;
        const __m256i shifts = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
        // A permutation looks at the low three bits only.
        const __m256i places = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
        const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
        const __m256i negative = _mm256_andnot_si256(
            _mm256_sllv_epi32(_mm256_set1_epi32(*sign), to_top), _mm256_set1_epi32(-0x7fffffff - 1));
        const V level = _mm256_permutevar8x32_ps(load(levels), places);
        values[0] = _mm256_xor_ps(level * set1(weights[0]), _mm256_castsi256_ps(negative));
    }
};

struct Bytes256 {
    typedef __m256i V;

    static V load(const void *from) { return _mm256_loadu_si256(static_cast<const V *>(from)); }
    static void store(void *to, V x) { _mm256_storeu_si256(static_cast<V *>(to), x); }
    static V zero() { return _mm256_setzero_si256(); }
    static V add(V a, V b) { return _mm256_add_epi8(a, b); }
    static V sub(V a, V b) { return _mm256_sub_epi8(a, b); }
    // A difference below 0 becomes 0.
    static V less(V a, uint8_t b) {
        return _mm256_subs_epu8(a, _mm256_set1_epi8(static_cast<char>(b)));
    }
    static V max(V a, V b) { return _mm256_max_epu8(a, b); }
    static V interleave_low(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
    static V interleave_high(V a, V b) { return _mm256_unpackhi_epi8(a, b); }

    // See Bytes512.
    static V lower(V x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
    static V raise(V x) {
        return _mm256_andnot_si256(_mm256_set1_epi8(15), _mm256_slli_epi16(x, 4));
    }

    static V increase(V x, V marks) {
        const V unmarked = _mm256_cmpeq_epi8(marks, zero());
        return _mm256_andnot_si256(unmarked, add(x, _mm256_set1_epi8(1)));
    }

    template <class Lane> static V lanes(const Lane &lane) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(1), 1);
    }
};

// Looks up 32 bytes in a table of 256: each bit of a byte's upper half, from the lowest on, chooses
// of two.
class ShuffledTable {
  public:
    explicit ShuffledTable(const char *from) : from_(from) {}

    __m256i at(__m256i bytes) const {
        const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        __m256i parts[16];
        HFK_UNROLL for (int i = 0; i < 16; ++i) {
            const auto *sixteen = reinterpret_cast<const __m128i *>(from_ + 16 * i);
            parts[i] = _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(_mm_loadu_si128(sixteen)), low);
        }
        HFK_UNROLL for (int step = 0; step < 4; ++step) {
            // A blend looks at the highest bit.
            const __m256i chosen = _mm256_slli_epi16(bytes, 3 - step);
            HFK_UNROLL for (int i = 0; i < 8 >> step; ++i) {
                parts[i] = _mm256_blendv_epi8(parts[2 * i], parts[2 * i + 1], chosen);
            }
        }
        return parts[0];
    }

  private:
    const char *from_;
};

typedef NibbleScan<Bytes256, ShuffledTable> Scan;

} // namespace

HFK_DEFINE_KERNEL(avx2_kernel, Avx2, Scan, rerank<Avx2>);
