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

// The fp16 bits of a number that fp16 has, and that is normal there or 0.
inline uint16_t fp16_of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const uint32_t size = bits & 0x7fffffffu;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | (size == 0 ? 0 : (size - 0x38000000u) >> 13));
}

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
            const uint16_t half = dtype_ == HFK_FLOAT16 ? fp16_of(number) : bits >> 16;
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

// The first fault that `judge(batch, head, query)` tells of; null where it tells of none.
template <class Judge>
const char *first_fault(int64_t batch, int64_t heads, int64_t queries, Judge judge) {
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t q = 0; q < queries; ++q) {
                if (const char *fault = judge(b, h, q)) return fault;
            }
        }
    }
    return nullptr;
}

// How far off weights are at most where they are rounded to bf16: by a share of themselves.
inline double weight_error(int32_t dtype, int32_t path) {
    const bool has_pairs = hfk_has_path(HFK_AVX512_BF16) &&
                           (path == HFK_AVX512_BF16 || path == HFK_AUTO);
    return dtype == HFK_BFLOAT16 && has_pairs ? 1.0 / 256 : 0.0;
}

// The same for a step or given ids, which round the weights of many heads.
inline double weight_error(const hfk_request &r) {
    return r.query_heads >= 12 * r.id_heads ? weight_error(r.dtype, r.path) : 0.0;
}

// Attention of one query by plain arithmetic, row by row.
class PlainAttention {
  public:
    explicit PlainAttention(int64_t value_dim) : sum_(value_dim, 0.0), size_(value_dim, 0.0) {}

    // A row with this score; `value(d)` is a number of its value.
    template <class Value> void add(double score, Value value) {
        const double weight = std::exp(score);
        total_ += weight;
        for (size_t d = 0; d < sum_.size(); ++d) {
            sum_[d] += weight * value(d);
            size_[d] += weight * std::abs(value(d));
        }
    }

    // -inf without rows.
    double lse() const { return std::log(total_); }

    // With a further weight that has no value; 0 without rows.
    double mean(int64_t d, double weight = 0.0) const {
        return total_ > 0.0 ? sum_[d] / (total_ + weight) : 0.0;
    }

    // The mean of absolute numbers.
    double size(int64_t d) const { return total_ > 0.0 ? size_[d] / total_ : 0.0; }

  private:
    double total_ = 0.0;
    std::vector<double> sum_, size_;
};

// A byte codes a weight of ParisKV: five bits are the exponent, three the mantissa.
inline double weight_of(uint8_t code) {
    const int exponent = code >> 3, fraction = code & 7;
    return exponent > 0 ? std::ldexp(8 + fraction, exponent - 18) : std::ldexp(fraction, -17);
}

// Numbers `first` to `first + size - 1` of x by the orthonormal Walsh-Hadamard matrix, whose entry
// (i, j) has the sign of the bits of i & j. The size is a power of two.
inline void transform(std::vector<double> &x, int64_t first, int64_t size) {
    const std::vector<double> old(x.begin() + first, x.begin() + first + size);
    for (int64_t i = 0; i < size; ++i) {
        double sum = 0.0;
        for (int64_t j = 0; j < size; ++j) {
            sum += __builtin_popcountll(i & j) % 2 != 0 ? -old[j] : old[j];
        }
        x[first + i] = sum / std::sqrt(static_cast<double>(size));
    }
}

// The same for blocks of powers of two that make up the length of x, the largest first.
inline void transform(std::vector<double> &x) {
    int64_t first = 0;
    for (int64_t size = 1024; size > 0; size /= 2) {
        if ((x.size() & size) == 0) continue;
        transform(x, first, size);
        first += size;
    }
}

// A number of fp16 or bf16 by its bits.
inline double half_number(uint16_t bits, int32_t dtype) {
    if (dtype == HFK_BFLOAT16) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float number;
        std::memcpy(&number, &wide, sizeof number);
        return number;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 0   ? std::ldexp(fraction, -24)
                        : exponent < 31 ? std::ldexp(1024 + fraction, exponent - 25)
                        : fraction == 0 ? kInf
                                        : std::numeric_limits<double>::quiet_NaN();
    return (bits & 0x8000) != 0 ? -size : size;
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
const char *fuzz_product(Random &random);
const char *fuzz_prompt(Random &random);
const char *fuzz_codes(Random &random);
const char *fuzz_encoding(Random &random);

// The same of numbers that random requests don't have, on a path that there is.
const char *check_numbers(int32_t path, uint64_t seed);
