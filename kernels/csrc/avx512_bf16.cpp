// AVX-512 with BF16 and VBMI. bf16 keys are multiplied with bf16 queries as they are, two products
// in each lane. Products are exact and sums are fp32; numbers below 2^-126 count as 0. Prompts round
// softmax weights to bf16. Other types of rows go to the code for AVX-512. Bytes are looked up in tables that lie in registers.
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

    // Number i has low[i] in its lower half and high[i] in its upper one, both in bf16.
    static V rounded_pair(V low, V high) {
        const __m512i bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        const __m512i evens = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits));
        const __m512i odds = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1));
        return _mm512_castsi512_ps(_mm512_or_si512(evens, _mm512_slli_epi32(odds, 16)));
    }
};

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

typedef PromptWork<Avx512Bf16, Bf16> PromptOfBf16;

int64_t prompt_floats_any(const hfk_prompt &request, int64_t queries) {
    if (request.dtype == HFK_BFLOAT16) return PromptOfBf16::floats(request, queries);
    return avx512_kernel.prompt_floats(request, queries);
}

void prompt_any(const PromptTile &tile) {
    if (tile.request->dtype == HFK_BFLOAT16) return PromptOfBf16::attend(tile);
    avx512_kernel.prompt(tile);
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
    sign_points, NibbleScan::packed_bytes, NibbleScan::pack, NibbleScan::scan,
    Shared<&Kernel::candidates>::run, BlockRerank::rerank,
    Shared<&Kernel::relevance>::run, Shared<&Kernel::best>::run,
    prompt_floats_any, prompt_any,
    Shared<&Kernel::encode>::run, Shared<&Kernel::decode>::run};
