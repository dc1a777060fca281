// Rows in codes, as higgs/naive.py has them: pairs of numbers, rounded to points of a grid after a
// signed Hadamard transform of each group. See rows.h on linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int64_t kPad = 16; // floats to which buffers are rounded up; a multiple of all lanes

inline int64_t padded(int64_t count) { return (count + kPad - 1) / kPad * kPad; }

// Numbers of the largest group.
constexpr int64_t kMostGroup = 1024;

inline int64_t code_bytes(const hfk_coding &coding, int64_t width) { return width * coding.bits / 8; }

inline int64_t scale_bytes(const hfk_coding &coding, int64_t width) { return width / coding.group * 2; }

// Codes, one in a byte, of the `count` numbers from `first` on of a row of `width`; both are multiples
// of 8. They are in `room`, or where they lie.
inline const uint8_t *unpacked(const uint8_t *row, int bits, int64_t width, int64_t first,
                               int64_t count, uint8_t *room) {
    if (bits == 4) return row + first / 2;
    if (bits == 2) {
        const uint8_t *bytes = row + first / 4;
        for (int64_t i = 0; i < count / 4; ++i) {
            room[2 * i] = bytes[i] & 15;
            room[2 * i + 1] = bytes[i] >> 4;
        }
        return room;
    }
    // Words of three bytes, which lie in three planes.
    const int64_t plane = width / 8;
    const uint8_t *bytes = row + first / 8;
    for (int64_t i = 0; i < count / 8; ++i) {
        const uint32_t word = bytes[i] | bytes[i + plane] << 8 | bytes[i + 2 * plane] << 16;
        for (int j = 0; j < 4; ++j) room[4 * i + j] = word >> 6 * j & 63;
    }
    return room;
}

// `codes` of `count` numbers, the inverse of `unpacked`.
inline void pack(const uint8_t *codes, int bits, int64_t width, int64_t first, int64_t count,
                 uint8_t *row) {
    if (bits == 4) {
        std::memcpy(row + first / 2, codes, count / 2);
    } else if (bits == 2) {
        uint8_t *bytes = row + first / 4;
        for (int64_t i = 0; i < count / 4; ++i) bytes[i] = codes[2 * i] | codes[2 * i + 1] << 4;
    } else {
        const int64_t plane = width / 8;
        uint8_t *bytes = row + first / 8;
        for (int64_t i = 0; i < count / 8; ++i) {
            uint32_t word = 0;
            for (int j = 0; j < 4; ++j) word |= static_cast<uint32_t>(codes[4 * i + j]) << 6 * j;
            for (int p = 0; p < 3; ++p) bytes[i + p * plane] = static_cast<uint8_t>(word >> 8 * p);
        }
    }
}

inline float scale_at(const uint8_t *scales, int64_t group) {
    return number_at(scales, HFK_FLOAT16, group);
}

// One stage of the transform within a vector: number i and number i ^ H, their sum and difference.
template <class I, int H> typename I::V stage_within(typename I::V x) {
    if constexpr (H >= I::lanes) {
        return x;
    } else {
        alignas(64) static constexpr struct Signs {
            float of[I::lanes];
            constexpr Signs() : of() {
                for (int i = 0; i < I::lanes; ++i) of[i] = (i & H) != 0 ? -1.0f : 1.0f;
            }
        } signs;
        return I::fma(x, I::load(signs.of), I::template swapped<H>(x));
    }
}

// The transform within a vector of numbers that are in groups of `group`.
template <class I> typename I::V within(typename I::V x, int64_t group) {
    x = stage_within<I, 4>(stage_within<I, 2>(stage_within<I, 1>(x)));
    return group >= 16 ? stage_within<I, 8>(x) : x;
}

// Points of a group, times `factor`; transformed within vectors, where it `turns`.
template <class I, bool turns>
void look_up(const uint8_t *codes, const hfk_coding &coding, float factor, float *to) {
    const int64_t group = coding.group;
    const auto points = [&](const uint8_t *own) {
        const typename I::V x = I::pairs_at(own, coding.grid, coding.bits) * I::set1(factor);
        return turns ? within<I>(x, group) : x;
    };
    if (group < I::lanes) {
        uint8_t some[I::lanes / 2] = {};
        float numbers[I::lanes];
        std::memcpy(some, codes, group / 2);
        I::store(numbers, points(some));
        std::memcpy(to, numbers, group * sizeof *numbers);
        return;
    }
    for (int64_t i = 0; i < group; i += I::lanes) I::store(to + i, points(codes + i / 2));
}

// A row of `width` numbers as it lies in its codes, transformed: points times scales.
template <class I>
void transformed_row(const hfk_coding &coding, const uint8_t *codes, const uint8_t *scales,
                     int64_t width, float *to) {
    uint8_t room[kMostGroup / 2];
    for (int64_t first = 0; first < width; first += coding.group) {
        const uint8_t *own = unpacked(codes, coding.bits, width, first, coding.group, room);
        look_up<I, false>(own, coding, scale_at(scales, first / coding.group), to + first);
    }
}

// Walsh-Hadamard transform of each group, not normalized, but for what `within` does.
template <class I> void across(float *x, int64_t count, int64_t group) {
    using V = typename I::V;
    int64_t h = I::lanes;
    // Two stages at once, as long as there are two.
    for (; 2 * h < group; h *= 4) {
        for (int64_t first = 0; first < count; first += 4 * h) {
            for (int64_t i = first; i < first + h; i += I::lanes) {
                const V a = I::load(x + i), b = I::load(x + i + h);
                const V c = I::load(x + i + 2 * h), d = I::load(x + i + 3 * h);
                const V sum = a + b, difference = a - b, sum2 = c + d, difference2 = c - d;
                I::store(x + i, sum + sum2);
                I::store(x + i + h, difference + difference2);
                I::store(x + i + 2 * h, sum - sum2);
                I::store(x + i + 3 * h, difference - difference2);
            }
        }
    }
    if (h < group) {
        for (int64_t first = 0; first < count; first += 2 * h) {
            for (int64_t i = first; i < first + h; i += I::lanes) {
                const V a = I::load(x + i), b = I::load(x + i + h);
                I::store(x + i, a + b);
                I::store(x + i + h, a - b);
            }
        }
    }
}

// From numbers to what codes are made of, `to_codes`, or back: an orthonormal transform, with signs.
// `x` has room for whole vectors.
template <class I> void turn(const hfk_coding &coding, float *x, int64_t width, bool to_codes) {
    const float norm = 1.0f / std::sqrt(static_cast<float>(coding.group));
    const auto change_signs = [&] {
        for (int64_t first = 0; first < width; first += coding.group) {
            for (int64_t i = 0; i < coding.group; ++i) x[first + i] *= coding.signs[i] * norm;
        }
    };
    if (to_codes) change_signs();
    const int64_t end = (width + I::lanes - 1) / I::lanes * I::lanes;
    for (int64_t i = width; i < end; ++i) x[i] = 0.0f;
    for (int64_t i = 0; i < end; i += I::lanes) {
        I::store(x + i, within<I>(I::load(x + i), coding.group));
    }
    across<I>(x, end, coding.group);
    if (!to_codes) change_signs();
}

// Rows to and from codes, one by one.
template <class I> struct CodeWork {
    // Numbers that are transformed together: a group, or as many as fill vectors.
    static int64_t piece_of(const hfk_coding &coding) { return std::max<int64_t>(coding.group, 16); }

    static void decode(const hfk_codes &work, int64_t first, int64_t last) {
        const hfk_coding &coding = work.coding;
        const int64_t piece = piece_of(coding);
        const float norm = 1.0f / std::sqrt(static_cast<float>(coding.group));
        float x[kMostGroup], signs[kMostGroup];
        for (int64_t i = 0; i < piece; ++i) signs[i] = coding.signs[i % coding.group];
        for (int64_t row = first; row < last; ++row) {
            const uint8_t *codes = work.codes + row * work.code_row;
            const uint8_t *scales = work.scales + row * work.scale_row;
            for (int64_t start = 0; start < work.width; start += piece) {
                const int64_t count = std::min(piece, work.width - start);
                points(work, codes, scales, start, count, norm, x);
                across<I>(x, piece, coding.group);
                write(work, x, signs, row, start, count);
            }
        }
    }

    static void encode(const hfk_codes &work, int64_t first, int64_t last) {
        const hfk_coding &coding = work.coding;
        const int64_t piece = piece_of(coding), group = coding.group;
        float x[kMostGroup], signs[kMostGroup];
        uint8_t codes[kMostGroup / 2];
        int32_t cells[kMostGroup];
        for (int64_t i = 0; i < piece; ++i) signs[i] = coding.signs[i % group];
        for (int64_t row = first; row < last; ++row) {
            uint8_t *own_codes = work.codes + row * work.code_row;
            uint8_t *own_scales = work.scales + row * work.scale_row;
            for (int64_t start = 0; start < work.width; start += piece) {
                const int64_t count = std::min(piece, work.width - start);
                read(work, row, start, count, x);
                std::fill(x + count, x + piece, 0.0f);
                for (int64_t g = 0; g < count; g += group) {
                    put_scale(x + g, group, own_scales + 2 * ((start + g) / group));
                }
                for (int64_t i = 0; i < piece; i += I::lanes) {
                    I::store(x + i, within<I>(I::load(x + i) * I::load(signs + i), group));
                }
                across<I>(x, piece, group);
                // Before the first cell and behind the last one there are none.
                for (int64_t i = 0; i < count; ++i) {
                    const float cell = (x[i] + HFK_REACH) * (HFK_CELLS / (2.0f * HFK_REACH));
                    const float least = cell < 0.0f ? -1.0f : cell;
                    cells[i] = static_cast<int32_t>(std::min(least, HFK_CELLS + 0.0f));
                }
                for (int64_t i = 0; i < count; i += 2) {
                    codes[i / 2] = nearest(work, cells[i], cells[i + 1], x[i], x[i + 1]);
                }
                pack(codes, coding.bits, work.width, start, count, own_codes);
            }
        }
    }

  private:
    static void points(const hfk_codes &work, const uint8_t *codes, const uint8_t *scales,
                       int64_t start, int64_t count, float norm, float *x) {
        const hfk_coding &coding = work.coding;
        uint8_t room[kMostGroup / 2];
        const uint8_t *own = unpacked(codes, coding.bits, work.width, start, count, room);
        for (int64_t g = 0; g < count; g += coding.group) {
            const float scale = scale_at(scales, (start + g) / coding.group);
            look_up<I, true>(own + g / 2, coding, scale * norm, x + g);
        }
        std::fill(x + count, x + piece_of(coding), 0.0f);
    }

    static void read(const hfk_codes &work, int64_t row, int64_t start, int64_t count, float *x) {
        const int64_t place = row * work.width + start;
        if (work.dtype == HFK_FLOAT32) {
            std::memcpy(x, static_cast<const float *>(work.numbers) + place, count * sizeof *x);
        } else if (work.dtype == HFK_FLOAT16) {
            widen(static_cast<const Half *>(work.numbers) + place, count, x);
        } else {
            widen(static_cast<const Bf16 *>(work.numbers) + place, count, x);
        }
    }

    template <class T> static void widen(const T *from, int64_t count, float *x) {
        int64_t i = 0;
        for (; i + I::lanes <= count; i += I::lanes) I::store(x + i, I::load(from + i));
        if (i < count) I::store(x + i, I::load_some(from + i, static_cast<int>(count - i)));
    }

    // Changes the numbers.
    static void write(const hfk_codes &work, float *x, const float *signs, int64_t row,
                      int64_t start, int64_t count) {
        const int64_t place = row * work.width + start;
        const bool is_float = work.dtype == HFK_FLOAT32;
        float *to = is_float ? static_cast<float *>(work.numbers) + place : x;
        if (work.added == nullptr) {
            for (int64_t i = 0; i < count; ++i) to[i] = x[i] * signs[i];
        } else {
            const float *added = work.added + row / work.added_every * work.width + start;
            for (int64_t i = 0; i < count; ++i) to[i] = x[i] * signs[i] + added[i];
        }
        if (!is_float) {
            write_numbers(x, work.dtype, static_cast<uint16_t *>(work.numbers) + place, count);
        }
    }

    // The scale of a group; its numbers are divided by it, and by what normalizes the transform.
    static void put_scale(float *x, int64_t group, uint8_t *to) {
        float energy = 0.0f, parts[8] = {};
        for (int64_t i = 0; i < group; i += 8) {
            for (int j = 0; j < 8; ++j) parts[j] += x[i + j] * x[i + j];
        }
        for (int j = 0; j < 8; ++j) energy += parts[j];
        const bool is_finite = energy < std::numeric_limits<float>::infinity();
        const float root = std::sqrt(energy / static_cast<float>(group));
        const uint16_t half = is_finite ? float16_of(std::min(root, 65504.0f)) : 0x7e00;
        std::memcpy(to, &half, sizeof half);
        const float scale = number_at(&half, HFK_FLOAT16, 0);
        const bool counts = is_finite && scale > 0.0f;
        const float factor = counts ? 1.0f / (scale * std::sqrt(static_cast<float>(group))) : 0.0f;
        for (int64_t i = 0; i < group; ++i) x[i] = counts ? x[i] * factor : 0.0f;
    }

    // The point of the largest merit x * px + y * py - (px^2 + py^2) / 2; the first of equals.
    static uint8_t nearest(const hfk_codes &work, uint32_t column, uint32_t line, float x,
                           float y) {
        if (std::max(column, line) < HFK_CELLS) {
            const uint8_t *list = work.near + (column * HFK_CELLS + line) * HFK_NEAR;
            const float second = merit(work, list[1], x, y);
            float most = merit(work, list[0], x, y);
            uint8_t best = second > most ? list[1] : list[0];
            most = second > most ? second : most;
            if (list[2] == list[1]) return best;
            for (int i = 2; i < HFK_NEAR; ++i) {
                const float own = merit(work, list[i], x, y);
                best = own > most ? list[i] : best;
                most = own > most ? own : most;
            }
            return best;
        }
        int best = 0;
        for (int point = 1; point < 1 << 2 * work.coding.bits; ++point) {
            if (merit(work, point, x, y) > merit(work, best, x, y)) best = point;
        }
        return static_cast<uint8_t>(best);
    }

    static float merit(const hfk_codes &work, int point, float x, float y) {
        const float *own = work.merits + 4 * point;
        return x * own[0] + y * own[1] - own[2];
    }
};

} // namespace
