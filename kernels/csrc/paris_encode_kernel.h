// ParisKV's codes of keys. A file for each instruction set includes this: its compiler maps the loops
// over lanes to vectors. See rows.h on linkage.
#pragma once

#include <algorithm>
#include <cmath>

#include "paris_encode.h"
#include "numbers.h"

namespace {

constexpr int64_t kLanes = 16; // keys side by side
constexpr int64_t kLongest = 1024;

// `dim` numbers of one key, zeros behind its own.
inline void load_key(const hfk_paris_encoding &request, const char *key, float *row) {
    const int64_t count = request.head_dim;
    if (request.dtype == HFK_BFLOAT16) {
        for (int64_t i = 0; i < count; ++i) {
            uint16_t half;
            __builtin_memcpy(&half, key + 2 * i, sizeof half);
            const uint32_t bits = static_cast<uint32_t>(half) << 16;
            __builtin_memcpy(row + i, &bits, sizeof bits);
        }
    } else {
        for (int64_t i = 0; i < count; ++i) row[i] = number_at(key, request.dtype, i);
    }
    std::fill(row + count, row + request.dim, 0.0f);
}

// The Walsh-Hadamard transform of `count` coordinates, a power of two.
inline void transform(float (*x)[kLanes], int64_t count) {
    for (int64_t half = 1; half < count; half *= 2) {
        for (int64_t start = 0; start < count; start += 2 * half) {
            for (int64_t i = start; i < start + half; ++i) {
                for (int64_t lane = 0; lane < kLanes; ++lane) {
                    const float a = x[i][lane], b = x[i + half][lane];
                    x[i][lane] = a + b;
                    x[i + half][lane] = a - b;
                }
            }
        }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(count));
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t lane = 0; lane < kLanes; ++lane) x[i][lane] *= scale;
    }
}

// The bits of a subspace, and its weights.
inline void encode_subspace(const float (*x)[kLanes], const float *levels, uint32_t *signs,
                            uint32_t *words, float *weights) {
    float lengths[kLanes] = {}, scales[kLanes], alphas[kLanes] = {};
    for (int64_t j = 0; j < 8; ++j) {
        for (int64_t lane = 0; lane < kLanes; ++lane) lengths[lane] += x[j][lane] * x[j][lane];
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        lengths[lane] = std::sqrt(lengths[lane]);
        scales[lane] = 1.0f / (lengths[lane] > 0.0f ? lengths[lane] : 1.0f);
    }
    float bounds[7];
    for (int64_t k = 0; k < 7; ++k) bounds[k] = (levels[k + 1] + levels[k]) / 2;
    for (int64_t j = 0; j < 8; ++j) {
        const uint32_t one = 1u << j;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float u = std::fabs(x[j][lane]) * scales[lane];
            float level = levels[0];
            uint32_t number = 0;
            for (int64_t k = 0; k < 7; ++k) {
                level = u > bounds[k] ? levels[k + 1] : level;
                number += u > bounds[k] ? 1u : 0u;
            }
            alphas[lane] += u * level;
            words[lane] |= number << 3 * j;
            signs[lane] |= x[j][lane] >= 0.0f ? one : 0u;
        }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        weights[lane] = lengths[lane] / (alphas[lane] > 0.0f ? alphas[lane] : 1.0f);
    }
}

inline void encode_keys(const hfk_paris_encoding &r, int64_t batch, int64_t head, int64_t first,
                        int64_t last) {
    const int64_t size = r.dtype == HFK_FLOAT32 ? 4 : 2;
    const int64_t bytes = r.dim / 8, width = 4 * bytes;
    const char *keys = static_cast<const char *>(r.keys) +
                       size * (batch * r.key_batch + head * r.key_head);
    uint8_t *sign = r.sign + batch * r.sign_batch + head * r.sign_head;
    uint8_t *record = r.record + batch * r.record_batch + head * r.record_head;
    alignas(64) float x[kLongest][kLanes];
    float rows[kLanes][kLongest], weights[kLanes];
    for (int64_t begin = first; begin < last; begin += kLanes) {
        const int64_t count = std::min(kLanes, last - begin);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            // Lanes without a key repeat the last one.
            const int64_t token = begin + (lane < count ? lane : count - 1);
            load_key(r, keys + size * token * r.key_row, rows[lane]);
        }
        for (int64_t i = 0; i < r.dim; ++i) {
            const int64_t source = i * r.stride % r.dim;
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                x[i][lane] = rows[lane][source] * r.signs[i];
            }
        }
        for (int64_t bit = kLongest, start = 0; bit > 0; bit /= 2) {
            if ((r.dim & bit) == 0) continue;
            transform(x + start, bit);
            start += bit;
        }
        for (int64_t byte = 0; byte < bytes; ++byte) {
            uint32_t signs[kLanes] = {}, words[kLanes] = {};
            encode_subspace(x + 8 * byte, r.levels, signs, words, weights);
            for (int64_t lane = 0; lane < count; ++lane) {
                // See code_weights in codes.py.
                const uint16_t half = float16_of(std::min(weights[lane], 57344.0f));
                record[(begin + lane) * width + 3 * bytes + byte] =
                    static_cast<uint8_t>((half + 64) >> 7);
                sign[(begin + lane) * bytes + byte] = static_cast<uint8_t>(signs[lane]);
                uint8_t *three = record + (begin + lane) * width + 3 * byte;
                for (int64_t k = 0; k < 3; ++k) three[k] = static_cast<uint8_t>(words[lane] >> 8 * k);
            }
        }
    }
}

} // namespace
