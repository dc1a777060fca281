// AVX-512 with BF16 and VBMI. Pairs of bf16 are multiplied as they are, with exact products and fp32
// sums; numbers below 2^-126 count as 0. Prompts and many heads round softmax weights to bf16. Other
// types of rows go to the code for AVX-512. Bytes are looked up in tables that lie in registers.
#include <type_traits>

#include "avx512_rerank.h"
#include "avx512_scan.h"

namespace {

struct Avx512Bf16 : Avx512 {
    template <class T> static constexpr bool multiplies = std::is_same_v<T, Bf16>;

    typedef __m512bh Pair;

    static Pair load_bits(const Bf16 *from) {
        return reinterpret_cast<Pair>(_mm512_loadu_si512(from));
    }

    static Pair as_pair(V bits) { return reinterpret_cast<Pair>(bits); }

    static V multiply_add(Pair a, Pair b, V sum) { return _mm512_dpbf16_ps(sum, a, b); }

    static V load_halves(const Bf16 *from) {
        return _mm512_castsi512_ps(_mm512_loadu_si512(from));
    }

    static V load_halves(const Bf16 *from, int64_t count) {
        const auto mask = static_cast<__mmask32>((uint32_t{1} << count) - 1);
        return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from));
    }

    // Pairs of the lower numbers of both, and then of the upper ones.
    static void zip_halves(V &a, V &b) {
        const __m512i low = _mm512_setr_epi32(
            0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
            0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        const __m512i first = _mm512_castps_si512(a), second = _mm512_castps_si512(b);
        a = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, low, second));
        b = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, high, second));
    }

    // Rounds both to bf16, and puts one after the other.
    static V rounded(V first, V second) {
        return reinterpret_cast<V>(_mm512_cvtne2ps_pbh(second, first));
    }
};

// Looks up 64 bytes in a table of 256, which lies in registers.
class PermutedTable {
  public:
    explicit PermutedTable(const char *from) {
        HFK_UNROLL for (int i = 0; i < 4; ++i) parts_[i] = _mm512_loadu_si512(from + 64 * i);
    }

    __m512i at(__m512i bytes) const {
        const __m512i low = _mm512_permutex2var_epi8(parts_[0], bytes, parts_[1]);
        const __m512i high = _mm512_permutex2var_epi8(parts_[2], bytes, parts_[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high);
    }

  private:
    __m512i parts_[4];
};

// See ShiftedPlaces: here a lane has a byte for each.
class PermutedPlaces {
  public:
    PermutedPlaces(const uint8_t *magnitude, const uint8_t *sign) {
        // Eight codes are three bytes: these go to a quadword, which is cut at every third bit.
        const __m512i spread = _mm512_setr_epi64(0x0000000000020100, 0x0000000000050403,
                                                 0x0000000000080706, 0x00000000000b0a09,
                                                 0x00000000000e0d0c, 0x000000000011100f,
                                                 0x0000000000141312, 0x0000000000171615);
        const __m512i cuts = _mm512_set1_epi64(0x15120f0c09060300);
        const __m256i raw = _mm256_maskz_loadu_epi8(0xffffff, magnitude);
        const __m512i lines = _mm512_permutexvar_epi8(spread, _mm512_castsi256_si512(raw));
        const __m512i codes = _mm512_multishift_epi64_epi8(cuts, lines);
        // Each byte takes the eight signs whose fourth is its own.
        const __m512i turns = _mm512_setr_epi64(
            0x04030201003f3e3d, 0x0c0b0a0908070605, 0x14131211100f0e0d, 0x1c1b1a1918171615,
            0x24232221201f1e1d, 0x2c2b2a2928272625, 0x34333231302f2e2d, 0x3c3b3a3938373635);
        int64_t all;
        __builtin_memcpy(&all, sign, sizeof all);
        const __m512i signs = _mm512_multishift_epi64_epi8(turns, _mm512_set1_epi64(all));
        bytes_ = _mm512_ternarylogic_epi32(_mm512_set1_epi8(8), signs, codes, 0xca);
    }

    __m512i at(int i) const { return _mm512_srli_epi32(bytes_, 8 * i); }

  private:
    __m512i bytes_;
};

typedef NibbleScan<Bytes512, PermutedTable> Scan;

bool attend_any(const hfk_request &request, const hfk_window *window, const Span &span,
                float *scratch, float *out, int64_t out_stride, float *lse, int64_t lse_stride) {
    auto *run = request.dtype == HFK_BFLOAT16 ? attend<Avx512Bf16, Bf16> : avx512_kernel.attend;
    return run(request, window, span, scratch, out, out_stride, lse, lse_stride);
}

bool score_any(const hfk_request &request, const Span &span, float *scratch, float *out,
               int64_t out_stride) {
    auto *run = request.dtype == HFK_BFLOAT16 ? score<Avx512Bf16, Bf16> : avx512_kernel.score;
    return run(request, span, scratch, out, out_stride);
}

void dense_scores_any(const hfk_request &request, const Span &span, const void *keys,
                      const uint8_t *valid, float *scratch, float *out, int64_t out_stride) {
    auto *run = request.dtype == HFK_BFLOAT16 ? dense_scores<Avx512Bf16, Bf16>
                                              : avx512_kernel.dense_scores;
    run(request, span, keys, valid, scratch, out, out_stride);
}

void prompt_any(const PromptTile &tile) {
    auto *run = tile.request->dtype == HFK_BFLOAT16 ? PromptWork<Avx512Bf16, Bf16>::run
                                                    : avx512_kernel.prompt;
    run(tile);
}

// Calls the code for AVX-512 where BF16 and VBMI bring nothing: the library has it once.
template <auto member, class Pointer = decltype(member)> struct Shared;
template <auto member, class Result, class... Arguments>
struct Shared<member, Result (*Kernel::*)(Arguments...)> {
    static Result run(Arguments... arguments) {
        return (avx512_kernel.*member)(arguments...);
    }
};

} // namespace

const Kernel avx512_bf16_kernel = {
    Workspace::floats, attend_any, score_any, dense_scores_any,
    Shared<&Kernel::proxy_scores>::run, Shared<&Kernel::exp>::run,
    Shared<&Kernel::points>::run, Shared<&Kernel::similar_points>::run,
    Scan::packed_bytes, Scan::pack, Scan::scan,
    Shared<&Kernel::candidates>::run, BlockRerank<PermutedPlaces>::rerank,
    Shared<&Kernel::relevance>::run, Shared<&Kernel::best>::run,
    prompt_any,
    Shared<&Kernel::encode>::run, Shared<&Kernel::decode>::run, Shared<&Kernel::product>::run};
