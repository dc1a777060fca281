// exp and tanh on vectors of fp32, for any instruction set. See rows.h on linkage.
#pragma once

#include "hf_kvret_host.h"

namespace {

// exp(x) of x <= 0 with a relative error below 3e-7; 0 below -87.3, NaN of NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is 1 + r + r^2 P(r), where P is a minimax fit for the
// relative error. 1.5 * 2^23 rounds to whole numbers, and leaves n in the low bits.
template <class I> typename I::V exp_of_nonpositive(typename I::V x) {
    using V = typename I::V;
    const V magic = I::set1(12582912.0f);
    const V shifted = I::fma(x, I::set1(1.44269504088896341f), magic);
    const V n = shifted - magic;
    // ln 2 in two parts; products of n with the first one are exact.
    V r = I::fma(n, I::set1(-0.693359375f), x);
    r = I::fma(n, I::set1(2.12194440e-4f), r);
    V p = I::set1(0.0013814467f);
    p = I::fma(p, r, I::set1(0.0083687808f));
    p = I::fma(p, r, I::set1(0.0416683927f));
    p = I::fma(p, r, I::set1(0.1666651964f));
    p = I::fma(p, r, I::set1(0.4999999404f));
    p = I::fma(p, r * r, r);
    const V y = I::power_of_two(shifted);
    return I::where_less(x, I::set1(-87.3f), I::set1(0.0f), I::fma(p, y, y));
}

// tanh(x) with a relative error below 1e-6, also near 0, where 1 - exp(-2x) would cancel.
template <class I> typename I::V tanh(typename I::V x) {
    using V = typename I::V;
    const V one = I::set1(1.0f);
    const V size = I::abs(x);
    const V e = exp_of_nonpositive<I>(size * I::set1(-2.0f));
    const V large = (one - e) / (one + e);
    const V z = size * size;
    V p = I::set1(-0.0057170447f);
    p = I::fma(p, z, I::set1(0.0206505861f));
    p = I::fma(p, z, I::set1(-0.0537434965f));
    p = I::fma(p, z, I::set1(0.1333149076f));
    p = I::fma(p, z, I::set1(-0.3333328366f));
    const V small = I::fma(p, z * size, size);
    return I::copy_sign(I::where_less(size, I::set1(0.625f), small, large), x);
}

// Raw dot products, but for a part `mean_score`, to scores, in place; `count` is padded.
template <class I>
void finish_scores(float *scores, int64_t count, float scale, float softcap,
                   float mean_score = 0.0f) {
    using V = typename I::V;
    for (int64_t j = 0; j < count; j += I::lanes) {
        V s = (I::load(scores + j) + I::set1(mean_score)) * I::set1(scale);
        if (softcap > 0.0f) s = I::set1(softcap) * tanh<I>(s * I::set1(1.0f / softcap));
        I::store(scores + j, s);
    }
}

} // namespace
