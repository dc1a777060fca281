// Exact scores and proxies: all tokens are scored, the best of them chosen.
#include "search_case.h"

namespace {

// Multiplications that the plain arithmetic of one request may take.
constexpr int64_t kWork = 1000000;

// A search that scores every token.
class ScoringCase : public SearchCase {
  public:
    const char *run(const hfk_step &step, const Numbers &query, const KeyNumber &) const override {
        if (hfk_search_ids(&step, nullptr) != HFK_OK) return "status of hfk_search_ids";
        const hfk_request &r = step.attention;
        const int64_t group = r.query_heads / r.id_heads;
        return first_fault(r.batch, r.id_heads, r.queries, [&](int64_t b, int64_t h, int64_t q) {
            std::vector<std::vector<double>> scores(group);
            for (int64_t g = 0; g < group; ++g) {
                const int64_t head = h * group + g;
                scores[g].assign(step.tokens, -kInf);
                for (int64_t token = 0; token < step.tokens; ++token) {
                    if (!step.valid[b * step.valid_stride + token]) continue;
                    scores[g][token] = finish(product(step, query, b, head, q, token), r.softcap);
                }
            }
            double error = 0.0;
            const std::vector<double> relevance = group_relevance(scores, error);
            const int64_t place = (b * r.id_heads + h) * r.queries + q;
            return judge_best(r.ids + place * r.count, r.count, relevance, error);
        });
    }

  protected:
    // The score of a token, before a cap.
    virtual double product(const hfk_step &step, const Numbers &query, int64_t batch, int64_t head,
                           int64_t place, int64_t token) const = 0;

    virtual double finish(double score, double softcap) const { return capped(score, softcap); }
};

class FlatCase : public ScoringCase {
  public:
    FlatCase(Random &random, hfk_step &step) {
        const hfk_request &r = step.attention;
        step.tokens =
            pick_tokens(random, kWork / (r.batch * r.query_heads * r.queries * r.key_dim));
        const Strides strides(random, r.id_heads, step.tokens, r.key_dim);
        keys_ = strided(random, strides, r.batch, r.id_heads, step.tokens, r.key_dim, r.dtype);
        flat_ = {keys_.data(), strides.outer, strides.row};
    }

    const void *request() const override { return &flat_; }

  protected:
    double product(const hfk_step &step, const Numbers &query, int64_t batch, int64_t head,
                   int64_t place, int64_t token) const override {
        const hfk_request &r = step.attention;
        const int64_t own = ((batch * r.query_heads + head) * r.queries + place) * r.key_dim;
        const int64_t id_head = head / (r.query_heads / r.id_heads);
        const int64_t row =
            batch * flat_.batch_stride + id_head * flat_.head_stride + token * r.key_dim;
        double sum = 0.0;
        for (int64_t d = 0; d < r.key_dim; ++d) sum += query[own + d] * keys_[row + d];
        return sum * r.scale;
    }

  private:
    Numbers keys_;
    hfk_flat flat_;
};

class ProxyCase : public ScoringCase {
  public:
    ProxyCase(Random &random, hfk_step &step) {
        const hfk_request &r = step.attention;
        proxy_.rank = random.one_in(3) ? r.key_dim : random.pick(1, r.key_dim);
        do {
            proxy_.sets = random.pick(1, r.query_heads);
        } while (r.query_heads % proxy_.sets != 0);
        proxy_.dtype = static_cast<int32_t>(random.pick(0, 3));
        const int64_t heads = r.batch * r.query_heads * r.queries;
        step.tokens = pick_tokens(random, kWork / (heads * proxy_.rank));
        const Strides strides(random, proxy_.sets, step.tokens, proxy_.rank);
        rows_ = strided(random, strides, r.batch, proxy_.sets, step.tokens, proxy_.rank,
                        proxy_.dtype);
        query_ = Numbers(heads * proxy_.rank, HFK_FLOAT32);
        query_.fill(random, proxy_.dtype == HFK_INT8 ? 1 : 4);
        offset_ = Numbers(heads, HFK_FLOAT32);
        offset_.fill(random);
        proxy_.query = query_.floats();
        proxy_.offset = random.one_in(2) ? nullptr : offset_.floats();
        proxy_.rows = rows_.data();
        proxy_.batch_stride = strides.outer;
        proxy_.set_stride = strides.row;
    }

    const void *request() const override { return &proxy_; }

  protected:
    double product(const hfk_step &step, const Numbers &, int64_t batch, int64_t head,
                   int64_t place, int64_t token) const override {
        const hfk_request &r = step.attention;
        const int64_t own = (batch * r.query_heads + head) * r.queries + place;
        const int64_t set = head / (r.query_heads / proxy_.sets);
        const int64_t row =
            batch * proxy_.batch_stride + set * proxy_.set_stride + token * proxy_.rank;
        double sum = proxy_.offset == nullptr ? 0.0 : offset_[own];
        for (int64_t d = 0; d < proxy_.rank; ++d) {
            sum += query_[own * proxy_.rank + d] * rows_[row + d];
        }
        return sum;
    }

  private:
    Numbers query_, offset_, rows_;
    hfk_proxy proxy_{};
};

class CodebookCase : public ScoringCase {
  public:
    CodebookCase(Random &random, hfk_step &step) {
        const hfk_request &r = step.attention;
        const int64_t heads = r.batch * r.query_heads * r.queries;
        step.tokens = pick_tokens(random, kWork / heads);
        book_.words = random.one_in(2) ? random.pick(1, 9) : random.pick(1, 300);
        table_ = Numbers(heads * book_.words, HFK_FLOAT32);
        table_.fill(random);
        const Strides strides(random, r.id_heads, step.tokens, 1);
        codes_.resize(strides.size(r.batch, r.id_heads, step.tokens, 1));
        // Few of them name no codeword: of the first words behind the last one, or of all.
        const bool astray = random.one_in(4);
        for (uint16_t &code : codes_) {
            int64_t word = random.pick(0, book_.words - 1);
            if (astray && random.one_in(20)) {
                word = random.one_in(2) ? book_.words + random.pick(0, 1) : random.pick(0, 65535);
            }
            code = static_cast<uint16_t>(word);
        }
        book_.table = table_.floats();
        book_.codes = codes_.data();
        book_.batch_stride = strides.outer;
        book_.head_stride = strides.row;
    }

    const void *request() const override { return &book_; }

    bool leads_astray(const hfk_step &step) const override {
        for (int64_t b = 0; b < step.attention.batch; ++b) {
            for (int64_t h = 0; h < step.attention.id_heads; ++h) {
                for (int64_t token = 0; token < step.tokens; ++token) {
                    if (!step.valid[b * step.valid_stride + token]) continue;
                    if (code(b, h, token) >= book_.words) return true;
                }
            }
        }
        return false;
    }

  protected:
    double product(const hfk_step &step, const Numbers &, int64_t batch, int64_t head,
                   int64_t place, int64_t token) const override {
        const hfk_request &r = step.attention;
        const int64_t row = (batch * r.query_heads + head) * r.queries + place;
        const int64_t id_head = head / (r.query_heads / r.id_heads);
        return table_[row * book_.words + code(batch, id_head, token)];
    }

    // The table's scores are capped already.
    double finish(double score, double) const override { return score; }

  private:
    uint16_t code(int64_t batch, int64_t head, int64_t token) const {
        return codes_[batch * book_.batch_stride + head * book_.head_stride + token];
    }

    Numbers table_;
    std::vector<uint16_t> codes_;
    hfk_codebook book_{};
};

} // namespace

std::unique_ptr<SearchCase> make_search_case(Random &random, hfk_step &step) {
    switch (step.search_kind) {
    case HFK_SEARCH_FLAT:
        return std::make_unique<FlatCase>(random, step);
    case HFK_SEARCH_PROXY:
        return std::make_unique<ProxyCase>(random, step);
    case HFK_SEARCH_CODEBOOK:
        return std::make_unique<CodebookCase>(random, step);
    case HFK_SEARCH_LISTS:
        return make_list_case(random, step);
    default:
        return make_paris_case(random, step);
    }
}

Numbers strided(Random &random, const Strides &strides, int64_t outers, int64_t inners,
                int64_t tokens, int64_t dim, int32_t dtype) {
    Numbers numbers(strides.size(outers, inners, tokens, dim), dtype);
    for (int64_t o = 0; o < outers; ++o) {
        for (int64_t i = 0; i < inners; ++i) {
            numbers.fill(random, o * strides.outer + i * strides.row, tokens * dim);
        }
    }
    return numbers;
}

const char *judge_best(const int32_t *ids, int64_t count, const std::vector<double> &relevance,
                       double error) {
    const int64_t tokens = relevance.size();
    const int64_t known =
        tokens - std::count(relevance.begin(), relevance.end(), -kInf);
    const int64_t chosen = std::min(known, count);
    std::vector<bool> is_chosen(tokens, false);
    double least = kInf;
    for (int64_t k = 0; k < count; ++k) {
        if (k >= chosen) {
            if (ids[k] != -1) return "an id too many";
            continue;
        }
        if (ids[k] < 0 || ids[k] >= tokens) return "an id of no token";
        if (k > 0 && ids[k] <= ids[k - 1]) return "the order of ids";
        if (relevance[ids[k]] == -kInf) return "an id that is excluded";
        is_chosen[ids[k]] = true;
        least = std::min(least, relevance[ids[k]]);
    }
    for (int64_t token = 0; token < tokens; ++token) {
        if (!is_chosen[token] && chosen > 0 && relevance[token] > least + error) {
            return "a better token is left";
        }
    }
    return nullptr;
}

std::vector<double> group_relevance(const std::vector<std::vector<double>> &scores, double &error) {
    std::vector<double> relevance(scores[0].size(), -kInf);
    double size = 0.0;
    for (const std::vector<double> &own : scores) {
        double largest = -kInf, total = 0.0;
        for (double score : own) {
            if (score == -kInf) continue;
            largest = std::max(largest, score);
            size = std::max(size, std::abs(score));
        }
        for (double score : own) total += largest == -kInf ? 0.0 : std::exp(score - largest);
        const double lse = scores.size() == 1 || total == 0.0 ? 0.0 : largest + std::log(total);
        for (size_t i = 0; i < own.size(); ++i) relevance[i] = std::max(relevance[i], own[i] - lse);
    }
    error += 5e-6 * (1.0 + size);
    return relevance;
}

int64_t pick_tokens(Random &random, int64_t most) {
    const int64_t kind = random.pick(0, 9);
    if (kind == 0) return 0;
    if (kind == 1) return 1;
    const int64_t end = std::min<int64_t>(std::max<int64_t>(most, 2), kind < 7 ? 300 : 7000);
    return random.pick(kind < 7 ? 1 : end / 2, end);
}
