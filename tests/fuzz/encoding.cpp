// ParisKV's codes of keys.
#include "fuzz.h"

namespace {

struct Case {
    hfk_paris_encoding request{};
    Numbers keys, signs;
    std::vector<uint8_t> sign, record;

    explicit Case(Random &random) {
        const auto pick = [&random](int64_t low, int64_t high) { return random.pick(low, high); };
        hfk_paris_encoding &r = request;
        r.batch = pick(1, 2), r.heads = pick(1, 3), r.tokens = pick(0, 2) == 0 ? pick(0, 3) : pick(0, 600);
        r.dim = 8 * pick(1, 20), r.head_dim = pick(std::max<int64_t>(1, r.dim - 7), r.dim);
        r.stride = random.one_in(2) ? 1 : 2 * pick(0, 8) + 1;
        // A stride that has a divisor in common with dim would read numbers twice.
        while (r.stride > 1 && r.dim % r.stride == 0) r.stride += 2;
        const int64_t heads = r.batch * r.heads, room = r.tokens + pick(0, 2);
        r.key_row = r.head_dim + pick(0, 2), r.key_head = room * r.key_row;
        r.key_batch = r.heads * r.key_head;
        r.sign_head = room * r.dim / 8, r.sign_batch = r.heads * r.sign_head;
        r.record_head = room * width(), r.record_batch = r.heads * r.record_head;
        r.dtype = static_cast<int32_t>(pick(0, 2));
        r.path = random.path(), r.threads = static_cast<int32_t>(pick(1, 8));
        keys = Numbers(heads * room * r.key_row, r.dtype);
        keys.fill(random);
        signs = Numbers(r.dim, HFK_FLOAT32);
        signs.fill(random);
        rising_ = {0.1f, 0.22f, 0.31f, 0.4f, 0.52f, 0.61f, 0.75f, 0.9f};
        sign.assign(heads * room * r.dim / 8, 0xee), record.assign(heads * room * width(), 0xee);
        r.keys = keys.data(), r.signs = signs.floats(), r.levels = rising_.data();
        r.sign = sign.data(), r.record = record.data();
    }

    const char *run() {
        if (hfk_paris_encode(&request) != HFK_OK) return "status of hfk_paris_encode";
        const auto judge = [this](int64_t b, int64_t h, int64_t t) {
            return is_right(b, h, t) ? nullptr : "ParisKV's codes";
        };
        const hfk_paris_encoding &r = request;
        if (const char *fault = first_fault(r.batch, r.heads, r.tokens, judge)) return fault;
        request.dim += 4;
        return hfk_paris_encode(&request) == HFK_BAD_REQUEST ? nullptr : "an odd dim is not refused";
    }

  private:
    int64_t width() const { return request.dim / 2; }

    // The key in the order of rotated coordinates, transformed in blocks: dim as a sum of powers of two.
    std::vector<double> rotated(int64_t b, int64_t h, int64_t t) const {
        const hfk_paris_encoding &r = request;
        std::vector<double> x(r.dim);
        for (int64_t i = 0; i < r.dim; ++i) {
            const int64_t source = i * r.stride % r.dim;
            if (source >= r.head_dim) continue;
            double number = keys[b * r.key_batch + h * r.key_head + t * r.key_row + source];
            x[i] = number * signs[i];
        }
        transform(x);
        return x;
    }

    // Numbers near a limit may go to either side of it.
    bool is_right(int64_t b, int64_t h, int64_t t) const {
        const hfk_paris_encoding &r = request;
        const std::vector<double> x = rotated(b, h, t);
        const uint8_t *signs_of = sign.data() + b * r.sign_batch + h * r.sign_head + t * r.dim / 8;
        const uint8_t *three =
            record.data() + b * r.record_batch + h * r.record_head + t * width();
        for (int64_t first = 0; first < r.dim; first += 8) {
            double length = 0.0, alpha = 0.0;
            for (int64_t i = first; i < first + 8; ++i) length += x[i] * x[i];
            length = std::sqrt(length);
            for (int64_t i = first; i < first + 8; ++i) {
                const bool positive = signs_of[i / 8] >> i % 8 & 1;
                if (std::abs(x[i]) > 1e-4 && positive != (x[i] > 0)) return false;
                const uint8_t *own = three + 3 * (i / 8);
                const uint32_t word = own[0] | own[1] << 8 | own[2] << 16;
                const int64_t level = word >> 3 * (i % 8) & 7;
                const double u = length > 0 ? std::abs(x[i]) / length : 0.0;
                const double off = std::abs(u - rising_[level]);
                for (float other : rising_) {
                    if (length > 1e-3 && off > std::abs(u - other) + 1e-3) return false;
                }
                alpha += u * rising_[level];
            }
            const double want = length / (alpha > 0 ? alpha : 1.0);
            const double got = weight_of(three[3 * r.dim / 8 + first / 8]);
            if (length > 1e-3 && !(std::abs(got - want) <= .065 * want)) return false;
        }
        return true;
    }

    std::vector<float> rising_;
};

} // namespace

const char *fuzz_encoding(Random &random) { return Case(random).run(); }
