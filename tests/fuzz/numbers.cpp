// Numbers that random requests don't have: all of 8 and 16 bits, those that are not finite, and
// the range of exp.
#include "fuzz.h"

namespace {

// One page of rows of 16 bits, read by a query head or more, which share all ids.
struct Page {
    std::vector<uint16_t> query, rows;
    std::vector<int32_t> ids;
    int32_t table = 0;
    int64_t address;
    std::vector<float> out, lse;
    hfk_request request{};

    Page(int32_t path, int32_t dtype, int64_t heads, int64_t tokens, int64_t key_dim,
         int64_t value_dim)
        : query(heads * key_dim), rows(tokens * (key_dim + value_dim)), ids(tokens),
          address(reinterpret_cast<int64_t>(rows.data())),
          out(heads * std::max(tokens, value_dim), -7.0f), lse(heads, -7.0f) {
        for (int64_t i = 0; i < tokens; ++i) ids[i] = static_cast<int32_t>(i);
        hfk_request &r = request;
        r.query = query.data(), r.ids = ids.data(), r.table = &table, r.pages = &address;
        r.out = out.data(), r.lse = lse.data();
        r.batch = r.id_heads = r.kv_heads = r.queries = r.max_pages = r.page_count = 1;
        r.query_heads = heads, r.count = r.page_len = r.tokens = tokens;
        r.key_dim = r.value_start = key_dim, r.value_dim = value_dim;
        r.row_dim = key_dim + value_dim;
        r.scale = 1.0, r.dtype = dtype, r.path = path, r.threads = 1;
    }
};

// Rows with one number each and zeros, by a query of ones: a score is that number.
bool reads_all_numbers(int32_t path, int32_t dtype) {
    // Whole pairs of vectors, whole vectors and a part of one, whatever they hold.
    constexpr int64_t dim = 45, count = 65536;
    Page page(path, dtype, 1, count, dim, 1);
    const uint16_t one = dtype == HFK_FLOAT16 ? 0x3c00 : 0x3f80;
    std::fill(page.query.begin(), page.query.end(), one);
    for (int64_t i = 0; i < count; ++i) {
        page.rows[i * (dim + 1) + i % dim] = static_cast<uint16_t>(i);
    }
    if (hfk_scores(&page.request) != HFK_OK) return false;
    for (int64_t i = 0; i < count; ++i) {
        const double got = page.out[i], want = half_number(static_cast<uint16_t>(i), dtype);
        const bool both_nan = std::isnan(got) && std::isnan(want);
        // Products of bf16 are made without the smallest numbers.
        const bool is_flushed = path == HFK_AVX512_BF16 && dtype == HFK_BFLOAT16 &&
                                std::abs(want) < std::ldexp(1.0, -126) && got == 0.0;
        if (got != want && !both_nan && !is_flushed) return false;
    }
    return true;
}

// Proxies of one number each, from 127 down to -128: the best are the first ones.
bool orders_whole_numbers(int32_t path) {
    constexpr int64_t dim = 45, count = 256;
    Page page(path, HFK_FLOAT16, 1, count, dim, 1);
    const std::vector<float> query(dim, 1.0f);
    const std::vector<uint8_t> valid(count, 1);
    std::vector<int8_t> rows(count * dim);
    for (int64_t i = 0; i < count; ++i) rows[i * dim + i % dim] = static_cast<int8_t>(127 - i);
    hfk_proxy proxy{};
    proxy.query = query.data(), proxy.rows = rows.data(), proxy.dtype = HFK_INT8;
    proxy.sets = 1, proxy.rank = dim;
    hfk_step step{};
    step.search_kind = HFK_SEARCH_PROXY, step.search = &proxy;
    step.valid = valid.data(), step.tokens = count;
    step.window.value_row = 1;
    for (int64_t wanted = 1; wanted < count; wanted += 9) {
        page.request.count = wanted;
        step.attention = page.request;
        if (hfk_search_ids(&step, nullptr) != HFK_OK) return false;
        for (int64_t k = 0; k < wanted; ++k) {
            if (page.ids[k] != k) return false;
        }
    }
    return true;
}

// A key or value that is not finite does the same to each query head as in the portable code.
bool spreads_alike(Random &random, int32_t path, int32_t dtype) {
    const int64_t heads = random.pick(1, 9), tokens = random.pick(1, 150), dim = 2 * 16 + 5;
    Page page(path, dtype, heads, tokens, dim, dim);
    page.request.softcap = random.one_in(3) ? 2.0 : 0.0;
    const uint16_t exponent = dtype == HFK_FLOAT16 ? 0x7c00 : 0x7f80;
    // Numbers from 0.5 to 4 or so, of any sign.
    const uint16_t least = dtype == HFK_FLOAT16 ? 0x3800 : 0x3f00;
    const auto number = [&] {
        return static_cast<uint16_t>(random.pick(0, 1) << 15 | (least + random.pick(0, 383)));
    };
    for (uint16_t &bits : page.query) bits = number();
    for (uint16_t &bits : page.rows) bits = number();
    page.rows[random.pick(0, page.rows.size() - 1)] =
        static_cast<uint16_t>(random.pick(0, 1) << 15 | exponent | random.pick(0, 1));
    page.request.scale = 0.01;
    if (hfk_attend(&page.request) != HFK_OK) return false;
    const std::vector<float> out = page.out, lse = page.lse;
    page.request.path = HFK_PORTABLE;
    if (hfk_attend(&page.request) != HFK_OK) return false;
    const auto alike = [](float a, float b) {
        return is_close(a, b) || (std::isnan(a) && std::isnan(b));
    };
    return std::equal(out.begin(), out.end(), page.out.begin(), alike) &&
           std::equal(lse.begin(), lse.end(), page.lse.begin(), alike);
}

bool has_exp(int32_t path) {
    std::vector<float> in, out;
    for (int i = 0; i <= 87290; ++i) in.push_back(-1e-3f * static_cast<float>(i));
    for (float x = 1.0f; x > 1e-30f; x *= 0.5f) in.push_back(-x);
    out.resize(in.size());
    if (hfk_exp(path, in.data(), out.data(), in.size()) != HFK_OK) return false;
    for (size_t i = 0; i < in.size(); ++i) {
        if (!(std::abs(out[i] / std::exp(double(in[i])) - 1.0) < 1e-6)) return false;
    }
    const float special[] = {-0.0f, -88.0f, -1e30f, -std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()};
    float got[5];
    hfk_exp(path, special, got, 5);
    return got[0] == 1.0f && got[1] == 0.0f && got[2] == 0.0f && got[3] == 0.0f &&
           std::isnan(got[4]);
}

} // namespace

const char *check_numbers(int32_t path, uint64_t seed) {
    Random random(seed, path);
    for (int32_t dtype : {HFK_FLOAT16, HFK_BFLOAT16}) {
        if (!reads_all_numbers(path, dtype)) return "rows of all numbers of 16 bits";
        for (int i = 0; i < 100; ++i) {
            if (!spreads_alike(random, path, dtype)) return "numbers that are not finite";
        }
    }
    if (!orders_whole_numbers(path)) return "proxies of all numbers of 8 bits";
    return has_exp(path) ? nullptr : "exp";
}
