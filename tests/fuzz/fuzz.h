// What the files of the fuzz driver share: random choices, and arrays of exactly the size that the
// interface asks for, so that a sanitizer sees a read or write beyond them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "hf_kvret_host.h"

constexpr double kInf = std::numeric_limits<double>::infinity();

class Random {
  public:
    static constexpr int32_t kAnyPath = -2;

    // `path` is what requests ask for, an hfk_path or kAnyPath.
    Random(uint64_t seed, int32_t path) : engine_(seed), path_(path) {}

    // From `low` to `high`, both included.
    int64_t pick(int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(engine_);
    }

    bool one_in(int64_t count) { return pick(1, count) == 1; }

    uint8_t byte() {
        if (left_ == 0) bytes_ = engine_(), left_ = 8;
        --left_;
        const uint8_t next = static_cast<uint8_t>(bytes_);
        bytes_ >>= 8;
        return next;
    }

    int32_t path() {
        int32_t path = path_;
        while (path == kAnyPath || !hfk_has_path(path)) path = static_cast<int32_t>(pick(-1, 4));
        return path;
    }

  private:
    std::mt19937_64 engine_;
    const int32_t path_;
    uint64_t bytes_ = 0;
    int left_ = 0;
};

// Numbers of a dtype and the same in double. All types hold multiples of 1/16 up to 2.5 exactly;
// int8 has whole numbers.
class Numbers {
  public:
    Numbers() = default;

    // NaN, in int8 -1, until they are filled.
    Numbers(int64_t count, int32_t dtype)
        : dtype_(dtype), width_(dtype == HFK_FLOAT32 ? 4 : dtype == HFK_INT8 ? 1 : 2),
          bytes_(new char[count * width_]),
          values_(count, std::numeric_limits<double>::quiet_NaN()) {
        std::memset(bytes_.get(), 0xff, count * width_);
    }

    // Up to `most` sixteenths.
    void fill(Random &random, int64_t first, int64_t count, int most = 40) {
        for (int64_t i = first; i < first + count; ++i) {
            put(i, random.byte() % (2 * most + 1) - most);
        }
    }

    void fill(Random &random, int most = 40) { fill(random, 0, values_.size(), most); }

    const char *data() const { return bytes_.get(); }

    const float *floats() const { return reinterpret_cast<const float *>(bytes_.get()); }

    double operator[](int64_t place) const { return values_[place]; }

  private:
    void put(int64_t place, int sixteenths) {
        const float number = static_cast<float>(sixteenths) / 16.0f;
        char *to = bytes_.get() + place * width_;
        values_[place] = number;
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        if (dtype_ == HFK_FLOAT32) {
            std::memcpy(to, &number, sizeof number);
        } else if (dtype_ == HFK_INT8) {
            *to = static_cast<char>(sixteenths);
            values_[place] = sixteenths;
        } else {
            uint16_t half = static_cast<uint16_t>(bits >> 16);
            if (dtype_ == HFK_FLOAT16) {
                const uint32_t size = bits & 0x7fffffffu;
                const uint32_t rebiased = size == 0 ? 0 : size - 0x38000000u;
                half = static_cast<uint16_t>((bits >> 16 & 0x8000u) | rebiased >> 13);
            }
            std::memcpy(to, &half, sizeof half);
        }
    }

    int32_t dtype_ = HFK_FLOAT32;
    int64_t width_ = 4;
    std::unique_ptr<char[]> bytes_;
    std::vector<double> values_;
};

inline bool is_close(double got, double want) {
    return got == want || std::abs(got - want) < 2e-5 * (1.0 + std::abs(want));
}

inline double capped(double score, double softcap) {
    return softcap > 0 ? softcap * std::tanh(score / softcap) : score;
}

// An id of none of `tokens` tokens, which is not -1 either.
inline int32_t wrong_id(Random &random, int64_t tokens) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    const int64_t wrong[] = {tokens, tokens + 1, random.pick(tokens, most), most,
                             -2,     -most - 1,  random.pick(-most - 1, -2)};
    return static_cast<int32_t>(wrong[random.pick(0, 6)]);
}

// Runs a random request; null where the result is right, else what is wrong with it.
const char *fuzz_attention(Random &random);
const char *fuzz_step(Random &random);
const char *fuzz_prompt(Random &random);
const char *fuzz_codes(Random &random);
const char *fuzz_encoding(Random &random);

// The same of numbers that random requests don't have, on a path that there is.
const char *check_numbers(int32_t path, uint64_t seed);
