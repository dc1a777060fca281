// Products of a weight and few tokens.
#include "fuzz.h"

const char *fuzz_product(Random &random) {
    const int64_t tokens = random.pick(0, 9), outputs = random.pick(0, 40);
    const int64_t depth = random.pick(1, 150);
    hfk_product work{};
    work.tokens = tokens, work.outputs = outputs, work.depth = depth;
    work.dtype = static_cast<int32_t>(random.pick(0, 2));
    work.path = random.path();
    work.threads = static_cast<int32_t>(random.pick(1, 8));
    Numbers x(tokens * depth, work.dtype), weight(outputs * depth, work.dtype);
    Numbers bias(outputs, work.dtype), out(tokens * outputs, work.dtype);
    x.fill(random), weight.fill(random), bias.fill(random);
    const bool has_bias = random.one_in(2);
    work.x = x.data(), work.weight = weight.data();
    work.bias = has_bias ? bias.data() : nullptr;
    work.out = const_cast<char *>(out.data());
    if (hfk_run_product(&work) != HFK_OK) return "status of hfk_run_product";
    const double rounding = work.dtype == HFK_FLOAT32 ? 0.0 : std::ldexp(1.0, -8);
    for (int64_t i = 0; i < tokens * outputs; ++i) {
        const int64_t t = i / outputs, n = i % outputs;
        double want = has_bias ? bias[n] : 0.0, got;
        for (int64_t k = 0; k < depth; ++k) want += x[t * depth + k] * weight[n * depth + k];
        if (work.dtype == HFK_FLOAT32) {
            got = out.floats()[i];
        } else {
            uint16_t half;
            std::memcpy(&half, out.data() + 2 * i, sizeof half);
            got = half_number(half, work.dtype);
        }
        if (std::abs(got - want) > 1e-3 + rounding * std::abs(want)) return "a product";
    }
    return nullptr;
}
