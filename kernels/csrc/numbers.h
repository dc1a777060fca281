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

// Rounded to the nearest, ties to even, as torch rounds. NaN stays NaN.
[[maybe_unused]] inline uint16_t bfloat16_of(float number) {
    uint32_t bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Rounded as bfloat16_of; beyond 65504 Inf.
[[maybe_unused]] inline uint16_t float16_of(float number) {
    uint32_t bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (size < 0x38800000u) {
        // Subnormal halves are multiples of 2^-24, which is what 0.5 counts in a float.
        float small;
        __builtin_memcpy(&small, &size, sizeof small);
        small += 0.5f;
        uint32_t counted;
        __builtin_memcpy(&counted, &small, sizeof counted);
        return static_cast<uint16_t>(sign | (counted - 0x3f000000u));
    }
    const uint32_t rounded = size + 0xfffu + (size >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// `count` numbers of any dtype but HFK_INT8.
[[maybe_unused]] inline void write_numbers(const float *from, int32_t dtype, void *to,
                                           int64_t count) {
    if (dtype == HFK_FLOAT32) {
        __builtin_memcpy(to, from, count * sizeof *from);
        return;
    }
    uint16_t *halves = static_cast<uint16_t *>(to);
    if (dtype == HFK_BFLOAT16) {
        for (int64_t i = 0; i < count; ++i) halves[i] = bfloat16_of(from[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) halves[i] = float16_of(from[i]);
    }
}

} // namespace
