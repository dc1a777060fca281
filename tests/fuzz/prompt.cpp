// Attention of many queries to rows that lie side by side.
#include "fuzz.h"

namespace {

struct Case {
    hfk_prompt request{};
    Numbers query, keys, values;
    std::vector<uint8_t> valid;
    std::vector<float> out, lse, block_lse;
    std::vector<int64_t> positions;

    explicit Case(Random &random) {
        const auto pick = [&random](int64_t low, int64_t high) { return random.pick(low, high); };
        hfk_prompt &r = request;
        r.batch = pick(1, 2);
        r.kv_heads = pick(1, 3);
        r.query_heads = r.kv_heads * pick(1, 5);
        r.queries = pick(0, 3) == 0 ? pick(0, 4) : pick(0, 90);
        r.tokens = pick(0, 3) == 0 ? pick(0, 4) : pick(0, 200);
        r.key_dim = pick(1, 3) == 1 ? 64 : pick(1, 70);
        r.value_dim = pick(1, 3) == 1 ? 64 : pick(1, 140);
        r.causal = pick(0, 2) != 0;
        r.causal_offset = pick(-10, r.tokens + 5);
        r.scale = 0.1;
        r.softcap = pick(0, 2) == 0 ? 1.5 : 0.0;
        r.dtype = static_cast<int32_t>(pick(0, 2));
        r.threads = static_cast<int32_t>(pick(1, 8));
        r.path = random.path();
        // Rows of several heads may lie between two of one head.
        r.query_row = r.key_dim + pick(0, 3);
        r.query_head = r.queries * r.query_row;
        r.query_batch = r.query_heads * r.query_head;
        r.key_row = r.kv_heads * r.key_dim;
        r.key_head = r.key_dim;
        r.key_batch = r.tokens * r.key_row;
        r.value_row = r.value_dim;
        r.value_head = r.tokens * r.value_row;
        r.value_batch = r.kv_heads * r.value_head;
        query = Numbers(r.batch * r.query_batch, r.dtype);
        keys = Numbers(r.batch * r.key_batch, r.dtype);
        values = Numbers(r.batch * r.value_batch, r.dtype);
        query.fill(random);
        keys.fill(random);
        values.fill(random);
        r.valid_stride = r.tokens;
        if (pick(0, 1)) {
            valid.resize(r.batch * r.tokens + 1);
            for (uint8_t &token : valid) token = pick(0, 2) != 0;
            r.valid = valid.data();
        }
        const int64_t rows = r.batch * r.query_heads * r.queries;
        const float poison = std::numeric_limits<float>::quiet_NaN();
        out.assign(rows * r.value_dim, poison);
        lse.assign(rows, poison);
        r.query = query.data();
        r.keys = keys.data();
        r.values = values.data();
        r.out = out.data();
        r.lse = lse.data();
    }

    // Sums of blocks in place of attention, with a position for each query.
    void ask_for_blocks(Random &random) {
        hfk_prompt &r = request;
        r.block_len = 16 << random.pick(0, 3);
        block_lse.assign(r.batch * r.query_heads * r.queries * blocks(),
                         std::numeric_limits<float>::quiet_NaN());
        positions.resize(r.batch * r.queries + 1);
        for (int64_t &position : positions) position = random.pick(-2, r.tokens + 2);
        r.block_lse = block_lse.data();
        r.positions = positions.data();
        r.values = nullptr;
        r.out = r.lse = nullptr;
    }

    int64_t blocks() const { return (request.tokens + request.block_len - 1) / request.block_len; }

    int64_t last_token(int64_t b, int64_t q) const {
        if (!positions.empty()) return positions[b * request.queries + q];
        return request.causal ? request.causal_offset + q : request.tokens;
    }

    double sum_of_blocks(int64_t row) const {
        double total = 0.0;
        for (int64_t i = 0; i < blocks(); ++i) {
            total += std::exp(double(block_lse[row * blocks() + i]));
        }
        return std::log(total);
    }

    bool is_right(int64_t b, int64_t h, int64_t q) const {
        const hfk_prompt &r = request;
        const int64_t row = (b * r.query_heads + h) * r.queries + q;
        const int64_t kv_head = h / (r.query_heads / r.kv_heads);
        const int64_t at = b * r.query_batch + h * r.query_head + q * r.query_row;
        PlainAttention want(r.value_dim);
        for (int64_t t = 0; t < r.tokens; ++t) {
            if (t > last_token(b, q)) continue;
            if (r.valid != nullptr && valid[b * r.tokens + t] == 0) continue;
            double product = 0.0;
            for (int64_t d = 0; d < r.key_dim; ++d) {
                product += query[at + d] *
                           keys[b * r.key_batch + kv_head * r.key_head + t * r.key_row + d];
            }
            const double score = capped(r.scale * product, r.softcap);
            const int64_t value = b * r.value_batch + kv_head * r.value_head + t * r.value_row;
            want.add(score, [&](int64_t d) { return values[value + d]; });
        }
        if (request.block_len != 0) return is_close(sum_of_blocks(row), want.lse());
        bool right = is_close(lse[row], want.lse());
        for (int64_t d = 0; d < r.value_dim; ++d) {
            const double mean = want.mean(d), got = out[row * r.value_dim + d];
            const double rounding = weight_error(r.dtype, r.path) * want.size(d);
            right = right && (is_close(got, mean) || std::abs(got - mean) < rounding + 2e-5);
        }
        return right;
    }
};

} // namespace

const char *fuzz_prompt(Random &random) {
    Case made(random);
    if (random.one_in(3)) made.ask_for_blocks(random);
    const hfk_prompt &r = made.request;
    if (hfk_prompt_attention(&r) != HFK_OK) return "status of hfk_prompt_attention";
    return first_fault(r.batch, r.query_heads, r.queries, [&](int64_t b, int64_t h, int64_t q) {
        return made.is_right(b, h, q) ? nullptr : "attention of a prompt";
    });
}
