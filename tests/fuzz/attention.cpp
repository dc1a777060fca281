// Attention to given ids, its scores, and what hfk_rank makes of them.
#include "fuzz.h"

namespace {

struct Case {
    hfk_request request{};
    int64_t width, tokens;
    Numbers query;
    std::vector<Numbers> rows; // of each page
    std::vector<int32_t> ids, table;
    std::vector<int64_t> pages;
    std::vector<float> out, lse, scores;
    bool astray = false; // some id leads to no row

    explicit Case(Random &random) {
        const auto pick = [&random](int64_t low, int64_t high) { return random.pick(low, high); };
        hfk_request &r = request;
        r.batch = pick(1, 2);
        r.kv_heads = pick(1, 3);
        r.id_heads = r.kv_heads * pick(1, 2);
        // From 12 heads on that share ids, the library goes by panels of them.
        const bool many = pick(0, 3) == 0;
        r.query_heads = r.id_heads * (many ? pick(12, 70) : pick(1, 11));
        r.queries = many ? pick(0, 1) : pick(0, 3);
        r.count = pick(0, 3) == 0 ? pick(0, 4) : pick(0, many ? 200 : 700);
        r.key_dim = pick(1, 3) == 1 ? 64 : pick(1, 70);
        r.value_dim = pick(1, 3) == 1 ? 64 : pick(1, 70);
        r.page_len = pick(0, 1) ? 8 : pick(1, 9);
        r.max_pages = pick(1, 12);
        r.scale = 0.1;
        r.softcap = pick(0, 2) == 0 ? 1.5 : 0.0;
        r.dtype = static_cast<int32_t>(pick(0, 2));
        r.threads = static_cast<int32_t>(pick(1, 8));
        r.path = random.path();
        if (pick(0, 3) == 0) {
            r.value_start = pick(0, 2) == 0 ? pick(0, r.key_dim - 1) : 0;
            r.value_dim = pick(1, r.key_dim - r.value_start);
            r.row_dim = r.key_dim + (pick(0, 3) == 0 ? 3 : 0);
        } else {
            r.value_start = r.key_dim;
            r.row_dim = r.key_dim + r.value_dim;
        }
        width = r.row_dim;
        // The last page may be a part of one.
        tokens = r.tokens = r.max_pages * r.page_len - pick(0, r.page_len - 1);

        query = Numbers(r.batch * r.query_heads * r.queries * r.key_dim, r.dtype);
        query.fill(random);
        // More pages than table entries, so that some are in no row's table, and some in two.
        const int64_t page_count = r.max_pages + 3;
        for (int64_t page = 0; page < page_count; ++page) {
            rows.emplace_back(r.kv_heads * r.page_len * width, r.dtype);
            rows.back().fill(random);
            pages.push_back(reinterpret_cast<int64_t>(rows.back().data()));
        }
        table.resize(r.batch * r.max_pages);
        for (int32_t &page : table) page = static_cast<int32_t>(pick(0, page_count - 1));
        ids.resize(r.batch * r.id_heads * r.queries * r.count);
        const int64_t holes = pick(0, 3);
        for (int32_t &id : ids) {
            id = holes == 3 || pick(0, 3) < holes ? -1 : static_cast<int32_t>(pick(0, tokens - 1));
        }
        if (!ids.empty() && pick(0, 3) == 0) lead_astray(random);
        const int64_t heads = r.batch * r.query_heads * r.queries;
        const float poison = std::numeric_limits<float>::quiet_NaN();
        out.assign(heads * r.value_dim, poison);
        lse.assign(heads, poison);
        scores.assign(heads * r.count, poison);
        r.query = query.data();
        r.ids = ids.data();
        r.table = table.data();
        r.pages = pages.data();
        r.page_count = page_count;
    }

    const char *run() {
        const int32_t status = astray ? HFK_BAD_ID : HFK_OK;
        request.out = out.data();
        request.lse = lse.data();
        if (hfk_attend(&request) != status) return "status of hfk_attend";
        request.out = scores.data();
        request.lse = nullptr;
        if (hfk_scores(&request) != status) return "status of hfk_scores";
        if (astray) return nullptr;
        const auto judge = [this](int64_t b, int64_t h, int64_t q) {
            return is_right(b, h, q) ? nullptr : "attention or scores";
        };
        const hfk_request &r = request;
        if (const char *fault = first_fault(r.batch, r.query_heads, r.queries, judge)) return fault;
        return is_ranked() ? nullptr : "ranking";
    }

  private:
    // Make one id or more name no token, or lead to a table entry without a page.
    void lead_astray(Random &random) {
        const auto pick = [&random](int64_t low, int64_t high) { return random.pick(low, high); };
        constexpr int32_t largest = std::numeric_limits<int32_t>::max();
        const int64_t per_row = static_cast<int64_t>(ids.size()) / request.batch;
        for (int64_t bad = pick(1, 3); bad > 0; --bad) {
            const int64_t place = pick(0, static_cast<int64_t>(ids.size()) - 1);
            if (pick(0, 1)) {
                ids[place] = wrong_id(random, tokens);
                continue;
            }
            const int64_t column = pick(0, request.max_pages - 1);
            const int32_t wrong[] = {-1, -largest - 1, static_cast<int32_t>(pages.size()), largest};
            table[place / per_row * request.max_pages + column] = wrong[pick(0, 3)];
            ids[place] = static_cast<int32_t>(column * request.page_len);
        }
        astray = true;
    }

    // The best are as many as there can be, all different places of the ids, and none that was left
    // is more relevant.
    bool is_ranked() const {
        const hfk_request &r = request;
        const int64_t rows = r.batch * r.id_heads * r.queries, group = r.query_heads / r.id_heads;
        const int64_t wanted = r.count / 2 + 1;
        std::vector<int32_t> best(rows * wanted, -7);
        const hfk_ranking ranking = {scores.data(), ids.data(), best.data(), r.batch, r.query_heads,
                                     r.id_heads,    r.queries,  r.count,     wanted,  r.threads, r.path};
        if (hfk_rank(&ranking) != HFK_OK) return false;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t query = row % r.queries, first = row / r.queries * group;
            const int32_t *chosen = ids.data() + row * r.count;
            std::vector<double> relevance(r.count, -kInf);
            for (int64_t g = 0; g < group; ++g) {
                const float *own = scores.data() + ((first + g) * r.queries + query) * r.count;
                double total = 0.0;
                for (int64_t k = 0; k < r.count; ++k) total += std::exp(double(own[k]));
                for (int64_t k = 0; k < r.count; ++k) {
                    const double share = double(own[k]) - (group > 1 ? std::log(total) : 0.0);
                    relevance[k] = std::max(relevance[k], share);
                }
            }
            std::vector<double> sorted;
            for (int64_t k = 0; k < r.count; ++k) {
                if (chosen[k] >= 0) sorted.push_back(relevance[k]);
            }
            std::sort(sorted.rbegin(), sorted.rend());
            for (int64_t k = 0; k < wanted; ++k) {
                const int32_t id = best[row * wanted + k];
                if (k >= int64_t(sorted.size())) {
                    if (id != -1) return false;
                    continue;
                }
                bool named = false;
                for (int64_t place = 0; place < r.count; ++place) {
                    named = named || (chosen[place] == id && id >= 0 &&
                                      is_close(relevance[place], sorted[k]));
                }
                if (!named) return false;
            }
        }
        return true;
    }

    bool is_right(int64_t b, int64_t h, int64_t q) const {
        const hfk_request &r = request;
        const int64_t index = (b * r.query_heads + h) * r.queries + q;
        const int64_t id_head = h / (r.query_heads / r.id_heads);
        const int64_t kv_head = h / (r.query_heads / r.kv_heads);
        const int32_t *chosen = ids.data() + ((b * r.id_heads + id_head) * r.queries + q) * r.count;
        PlainAttention want(r.value_dim);
        for (int64_t k = 0; k < r.count; ++k) {
            const double got = scores[index * r.count + k];
            if (chosen[k] < 0) {
                if (got != -kInf) return false;
                continue;
            }
            const int64_t page = table[b * r.max_pages + chosen[k] / r.page_len];
            const int64_t row = (kv_head * r.page_len + chosen[k] % r.page_len) * width;
            double score = 0.0;
            for (int64_t d = 0; d < r.key_dim; ++d) {
                score += query[index * r.key_dim + d] * rows[page][row + d];
            }
            score = capped(score * r.scale, r.softcap);
            if (!is_close(got, score)) return false;
            want.add(score, [&](int64_t d) { return rows[page][row + r.value_start + d]; });
        }
        if (!is_close(lse[index], want.lse())) return false;
        for (int64_t d = 0; d < r.value_dim; ++d) {
            const double got = out[index * r.value_dim + d], error = weight_error(r) * want.size(d);
            if (!is_close(got, want.mean(d)) && !(std::abs(got - want.mean(d)) <= error)) return false;
        }
        return true;
    }
};

} // namespace

const char *fuzz_attention(Random &random) { return Case(random).run(); }
