// Numbers of any dtype, one by one. See rows.h on linkage.
#pragma once

#include "hf_kvret_host.h"

namespace {

[[maybe_unused]] inline float number_at(const void *numbers, int32_t dtype, int64_t place) {
    float number;
    if (dtype == HFK_FLOAT32) {
        __builtin_memcpy(&number, static_cast<const char *>(numbers) + 4 * place, sizeof number);
        return number;
    }
    uint16_t half;
    __builtin_memcpy(&half, static_cast<const char *>(numbers) + 2 * place, sizeof half);
    uint32_t bits = static_cast<uint32_t>(half) << 16;
    if (dtype == HFK_FLOAT16) {
        const uint32_t exponent = half >> 10 & 31u, fraction = half & 1023u;
        if (exponent == 0) {
            // Subnormal halves are multiples of 2^-24.
            const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
            return (half & 0x8000u) != 0 ? -size : size;
        }
        bits = static_cast<uint32_t>(half & 0x8000u) << 16 |
               (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

} // namespace
