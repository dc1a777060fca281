// Rows to and from codes, and attention to rows in codes.
#include "fuzz.h"

namespace {

constexpr double kHalf = 1.0 / 1024; // relative error of an fp16 number

double number_of(uint16_t half) { return half_number(half, HFK_FLOAT16); }

// A grid, signs, and what follows from them by plain arithmetic.
struct Coding {
    hfk_coding coding{};
    std::vector<float> grid, merits, signs;
    std::vector<uint8_t> near;

    explicit Coding(Random &random) {
        coding.bits = static_cast<int32_t>(random.pick(2, 4));
        coding.group = int64_t{8} << random.pick(0, 3);
        // A lattice, with room between its points.
        const int side = 1 << coding.bits;
        for (int i = 0; i < side * side; ++i) {
            const float x = (i / side - 0.5f * (side - 1)) * 0.4f, y = (i % side - 0.5f * (side - 1)) * 0.4f;
            grid.insert(grid.end(), {x, y});
            merits.insert(merits.end(), {x, y, (x * x + y * y) / 2, 0.0f});
        }
        for (int64_t i = 0; i < coding.group; ++i) signs.push_back(random.one_in(2) ? 1.0f : -1.0f);
        coding.grid = grid.data();
        coding.signs = signs.data();
    }

    int64_t code_bytes(int64_t width) const { return width * coding.bits / 8; }

    int64_t groups(int64_t width) const { return width / coding.group; }

    // Code of pair `pair` of a row.
    int code(const uint8_t *row, int64_t width, int64_t pair) const {
        if (coding.bits == 4) return row[pair];
        if (coding.bits == 2) return row[pair / 2] >> (pair % 2 * 4) & 15;
        const int64_t word = pair / 4, plane = width / 8;
        const uint32_t bytes = row[word] | row[word + plane] << 8 | row[word + 2 * plane] << 16;
        return bytes >> (pair % 4 * 6) & 63;
    }

    // Each group by its transform.
    std::vector<double> transformed(std::vector<double> x) const {
        for (size_t first = 0; first < x.size(); first += coding.group) {
            transform(x, first, coding.group);
        }
        return x;
    }

    // What a row stands for.
    std::vector<double> decoded(const uint8_t *row, const uint8_t *scales, int64_t width) const {
        std::vector<double> x(width);
        for (int64_t i = 0; i < width; ++i) {
            uint16_t half;
            std::memcpy(&half, scales + 2 * (i / coding.group), sizeof half);
            x[i] = number_of(half) * grid[2 * code(row, width, i / 2) + i % 2];
        }
        x = transformed(x);
        for (int64_t i = 0; i < width; ++i) x[i] *= signs[i % coding.group];
        return x;
    }
};

// Random codes and scales, of exactly their size.
void fill_codes(Random &random, uint8_t *codes, int64_t code_count, uint8_t *scales, int64_t groups) {
    for (int64_t i = 0; i < code_count; ++i) codes[i] = random.byte();
    for (int64_t g = 0; g < groups; ++g) {
        const uint16_t half = fp16_of(static_cast<float>(random.pick(0, 40)) / 16.0f);
        std::memcpy(scales + 2 * g, &half, sizeof half);
    }
}

const char *fuzz_rows(Random &random) {
    Coding own(random);
    const int64_t group = own.coding.group, rows = random.pick(0, 40);
    const int64_t width = group * random.pick(1, 5), groups = own.groups(width);
    const int64_t bytes = own.code_bytes(width);
    const auto pad = [&random] { return random.pick(0, 2) == 0 ? random.pick(0, 3) : 0; };
    hfk_codes work{};
    work.coding = own.coding;
    work.rows = rows, work.width = width;
    work.code_row = bytes + pad(), work.scale_row = 2 * groups + pad();
    work.added_every = rows > 0 && rows % 2 == 0 ? 2 : 1;
    work.dtype = static_cast<int32_t>(random.pick(0, 2));
    work.path = random.path();
    work.threads = static_cast<int32_t>(random.pick(1, 8));
    std::vector<uint8_t> codes(rows * work.code_row, 0xee), scales(rows * work.scale_row, 0xee);
    std::vector<uint8_t> near(HFK_CELLS * HFK_CELLS * HFK_NEAR);
    if (hfk_near_points(own.grid.data(), int64_t(own.grid.size()) / 2, near.data()) != HFK_OK) {
        return "status of hfk_near_points";
    }
    Numbers x(rows * width, work.dtype);
    x.fill(random);
    work.numbers = const_cast<char *>(x.data());
    work.codes = codes.data(), work.scales = scales.data();
    work.merits = own.merits.data(), work.near = near.data();
    if (hfk_encode(&work) != HFK_OK) return "status of hfk_encode";
    for (int64_t row = 0; row < rows; ++row) {
        std::vector<double> numbers(width);
        for (int64_t i = 0; i < width; ++i) numbers[i] = x[row * width + i] * own.signs[i % group];
        const std::vector<double> turned = own.transformed(numbers);
        for (int64_t i = 0; i < width; i += 2) {
            double energy = 0.0;
            for (int64_t j = 0; j < group; ++j) {
                const double number = numbers[i / group * group + j];
                energy += number * number / group;
            }
            uint16_t half;
            std::memcpy(&half, scales.data() + row * work.scale_row + 2 * (i / group), sizeof half);
            const double scale = number_of(half), root = std::sqrt(energy);
            if (!(std::abs(scale - root) <= kHalf * root + 1e-7)) return "scale of encoded rows";
            if (scale == 0.0) continue;
            const auto distance = [&](int point) {
                return std::hypot(turned[i] / scale - own.grid[2 * point],
                                  turned[i + 1] / scale - own.grid[2 * point + 1]);
            };
            double least = kInf;
            for (size_t p = 0; p < own.grid.size() / 2; ++p) least = std::min(least, distance(int(p)));
            const int code = own.code(codes.data() + row * work.code_row, width, i / 2);
            if (distance(code) > least + 1e-4) return "code of encoded rows";
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        fill_codes(random, codes.data() + row * work.code_row, bytes,
                   scales.data() + row * work.scale_row, groups);
    }
    work.dtype = HFK_FLOAT32;
    Numbers added(rows / work.added_every * width, HFK_FLOAT32);
    added.fill(random);
    if (random.one_in(2)) work.added = added.floats();
    std::vector<float> back(rows * width, std::numeric_limits<float>::quiet_NaN());
    work.numbers = back.data();
    if (hfk_decode(&work) != HFK_OK) return "status of hfk_decode";
    for (int64_t row = 0; row < rows; ++row) {
        const std::vector<double> want = own.decoded(
            codes.data() + row * work.code_row, scales.data() + row * work.scale_row, width);
        for (int64_t i = 0; i < width; ++i) {
            const double more = work.added == nullptr ? 0.0 : added[row / work.added_every * width + i];
            if (!(std::abs(back[row * width + i] - want[i] - more) <= 2e-4)) return "decoded rows";
        }
    }
    work.coding.bits = 5;
    return hfk_decode(&work) == HFK_BAD_REQUEST ? nullptr : "5 bits are not refused";
}

const char *fuzz_coded_attention(Random &random) {
    const auto pick = [&random](int64_t low, int64_t high) { return random.pick(low, high); };
    Coding own(random);
    const int64_t group = own.coding.group;
    const bool in_key = random.one_in(4);
    hfk_request r{};
    r.batch = pick(1, 2), r.kv_heads = pick(1, 2), r.id_heads = r.kv_heads * pick(1, 2);
    r.query_heads = r.id_heads * pick(1, 5), r.queries = pick(0, 2), r.count = pick(0, 200);
    r.key_dim = group * pick(1, 3);
    r.value_dim = in_key ? group * pick(1, r.key_dim / group) : group * pick(1, 3);
    r.page_len = pick(0, 1) ? 8 : pick(1, 9), r.max_pages = pick(1, 8);
    r.tokens = r.max_pages * r.page_len - pick(0, r.page_len - 1);
    r.scale = 0.1, r.softcap = pick(0, 2) == 0 ? 1.5 : 0.0;
    r.dtype = static_cast<int32_t>(pick(0, 2)), r.path = random.path();
    r.threads = static_cast<int32_t>(pick(1, 8));
    r.value_start = in_key ? 0 : own.code_bytes(r.key_dim);
    r.row_dim = own.code_bytes(r.key_dim + (in_key ? 0 : r.value_dim));
    const int64_t groups = own.groups(r.key_dim + (in_key ? 0 : r.value_dim));
    Numbers query(r.batch * r.query_heads * r.queries * r.key_dim, r.dtype);
    query.fill(random);
    Numbers mean(r.batch * r.kv_heads * r.key_dim, HFK_FLOAT32);
    mean.fill(random);
    if (random.one_in(2)) own.coding.key_mean = mean.floats();
    const int64_t head_bytes = r.page_len * (r.row_dim + 2 * groups);
    std::vector<std::vector<uint8_t>> rows;
    std::vector<int64_t> pages;
    for (int64_t page = 0; page < r.max_pages + 2; ++page) {
        rows.emplace_back(r.kv_heads * head_bytes);
        for (int64_t head = 0; head < r.kv_heads; ++head) {
            uint8_t *first = rows.back().data() + head * head_bytes;
            const int64_t codes = r.page_len * r.row_dim;
            fill_codes(random, first, codes, first + codes, r.page_len * groups);
        }
    }
    for (const auto &page : rows) pages.push_back(reinterpret_cast<int64_t>(page.data()));
    std::vector<int32_t> table(r.batch * r.max_pages), ids(r.batch * r.id_heads * r.queries * r.count);
    for (int32_t &page : table) page = static_cast<int32_t>(pick(0, int64_t(pages.size()) - 1));
    for (int32_t &id : ids) id = pick(0, 4) == 0 ? -1 : static_cast<int32_t>(pick(0, r.tokens - 1));
    const int64_t heads = r.batch * r.query_heads * r.queries;
    std::vector<float> out(heads * r.value_dim, NAN), lse(heads, NAN);
    r.query = query.data(), r.ids = ids.data(), r.table = table.data(), r.pages = pages.data();
    r.page_count = int64_t(pages.size()), r.out = out.data(), r.lse = lse.data();
    r.coding = &own.coding;
    if (!ids.empty() && pick(0, 5) == 0) {
        ids[pick(0, int64_t(ids.size()) - 1)] = wrong_id(random, r.tokens);
        return hfk_attend(&r) == HFK_BAD_ID ? nullptr : "a wrong id of coded rows";
    }
    if (hfk_attend(&r) != HFK_OK) return "status of hfk_attend of coded rows";
    std::vector<float> scores(heads * r.count, NAN);
    r.out = scores.data(), r.lse = nullptr;
    if (hfk_scores(&r) != HFK_OK) return "status of hfk_scores of coded rows";
    for (int64_t index = 0; index < heads; ++index) {
        const int64_t q = index % r.queries, h = index / r.queries % r.query_heads;
        const int64_t b = index / r.queries / r.query_heads, id_head = h / (r.query_heads / r.id_heads);
        const int64_t kv_head = h / (r.query_heads / r.kv_heads);
        const int32_t *chosen = ids.data() + ((b * r.id_heads + id_head) * r.queries + q) * r.count;
        PlainAttention want(r.value_dim);
        for (int64_t k = 0; k < r.count; ++k) {
            if (chosen[k] < 0) {
                if (scores[index * r.count + k] != -kInf) return "scores of holes";
                continue;
            }
            const int64_t page = table[b * r.max_pages + chosen[k] / r.page_len];
            const int64_t slot = chosen[k] % r.page_len;
            const uint8_t *head = rows[page].data() + kv_head * head_bytes;
            const uint8_t *codes = head + slot * r.row_dim;
            const uint8_t *scales = head + r.page_len * r.row_dim + slot * 2 * groups;
            const std::vector<double> key = own.decoded(codes, scales, r.key_dim);
            const std::vector<double> value =
                in_key ? key
                       : own.decoded(codes + r.value_start, scales + 2 * own.groups(r.key_dim),
                                     r.value_dim);
            double score = 0.0;
            for (int64_t d = 0; d < r.key_dim; ++d) {
                const double off = own.coding.key_mean == nullptr
                                       ? 0.0 : mean[(b * r.kv_heads + kv_head) * r.key_dim + d];
                score += query[index * r.key_dim + d] * (key[d] + off);
            }
            score = capped(score * r.scale, r.softcap);
            if (!(std::abs(scores[index * r.count + k] - score) <= 2e-3)) return "scores of codes";
            want.add(score, [&](int64_t d) { return value[d]; });
        }
        // Scores of a hundred or so are rounded like their sums.
        if (lse[index] != want.lse() && !(std::abs(lse[index] - want.lse()) <= 2e-3)) return "lse of codes";
        for (int64_t d = 0; d < r.value_dim; ++d) {
            const double got = out[index * r.value_dim + d];
            if (!(std::abs(got - want.mean(d)) <= 2e-3)) return "attention to codes";
        }
    }
    r.in_files = 1;
    return hfk_attend(&r) == HFK_BAD_REQUEST ? nullptr : "codes in files are not refused";
}

} // namespace

const char *fuzz_codes(Random &random) {
    const char *fault = fuzz_rows(random);
    return fault != nullptr ? fault : fuzz_coded_attention(random);
}
