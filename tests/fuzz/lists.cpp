// Lists of past queries: those of the nearest are recalled, and the best of their tokens chosen.
#include "search_case.h"

namespace {

// Multiplications that the plain arithmetic of one request may take.
constexpr int64_t kWork = 500000;

class ListCase : public SearchCase {
  public:
    ListCase(Random &random, hfk_step &step) {
        const hfk_request &r = step.attention;
        const int64_t queries = r.batch * r.query_heads * r.queries;
        step.tokens = pick_tokens(random, kWork / (queries * r.key_dim));
        lists_.width = random.pick(1, 40);
        lists_.pending = random.one_in(2) ? 0 : random.pick(0, step.tokens);
        lists_.following = random.one_in(2) ? 0 : random.pick(1, 5);
        lists_.largest = random.one_in(2);
        if (random.one_in(2)) {
            const int64_t size = r.key_dim * r.key_dim;
            const Strides of_metric(random, r.id_heads, 1, size);
            metric_ = Numbers(of_metric.size(r.batch, r.id_heads, 1, size), HFK_FLOAT32);
            metric_.fill(random);
            lists_.metric = metric_.floats();
            lists_.metric_batch = of_metric.outer, lists_.metric_head = of_metric.row;
        }
        int64_t count = 0;
        for (int g = 0; g < 2; ++g) {
            generations_.emplace_back(random, step, lists_.width, g == 1 && random.one_in(2));
            lists_.generations[g] = generations_[g].request;
            count += lists_.generations[g].count;
        }
        // All of them, or so few that any of them may be the nearest.
        recalls_all_ = random.one_in(2);
        lists_.nprobe = recalls_all_ ? count + random.pick(1, 3) : random.pick(1, 4);
    }

    const void *request() const override { return &lists_; }

    const char *run(const hfk_step &step, const Numbers &query,
                    const KeyNumber &key) const override {
        if (hfk_search_ids(&step, nullptr) != HFK_OK) return "status of hfk_search_ids";
        const hfk_request &r = step.attention;
        return first_fault(r.batch, r.id_heads, r.queries, [&](int64_t b, int64_t h, int64_t q) {
            return judge(step, query, key, list_tokens(step, b, h), b, h, q);
        });
    }

  private:
    struct Generation {
        Generation(Random &random, const hfk_step &step, int64_t width, bool is_empty) {
            const hfk_request &r = step.attention;
            const int64_t group = r.query_heads / r.id_heads;
            const int64_t count = is_empty ? 0 : random.one_in(3) ? 1 : random.pick(1, 90);
            request.count = count;
            if (is_empty) return;
            const int64_t heads = r.id_heads;
            const Strides of_queries(random, heads, count, group * r.key_dim);
            const Strides of_inverse(random, heads, count, group);
            const Strides of_low(random, heads, count, width), of_high(random, heads, count, width);
            queries = strided(random, of_queries, r.batch, heads, count, group * r.key_dim, r.dtype);
            inverse = Numbers(of_inverse.size(r.batch, heads, count, group), HFK_FLOAT32);
            inverse.fill(random);
            request.slot_batch = count + random.pick(0, 3);
            slots.resize((r.batch - 1) * request.slot_batch + count);
            for (int64_t &slot : slots) slot = random.one_in(6) ? -1 : 5;
            low.resize(of_low.size(r.batch, heads, count, width));
            const bool has_high = random.one_in(3);
            for (uint16_t &token : low) {
                token = static_cast<uint16_t>(random.one_in(30) ? random.pick(0, 65535)
                                                                : random.pick(0, step.tokens));
            }
            if (has_high) high.resize(of_high.size(r.batch, heads, count, width));
            for (uint8_t &bits : high) bits = random.one_in(20) ? random.byte() : 0;
            request.queries = queries.data(), request.inverse = inverse.floats();
            request.slots = slots.data(), request.low = low.data();
            request.high = has_high ? high.data() : nullptr;
            request.query_batch = of_queries.outer, request.query_head = of_queries.row;
            request.inverse_batch = of_inverse.outer, request.inverse_head = of_inverse.row;
            request.low_batch = of_low.outer, request.low_head = of_low.row;
            request.high_batch = of_high.outer, request.high_head = of_high.row;
        }

        Numbers queries, inverse;
        std::vector<int64_t> slots;
        std::vector<uint16_t> low;
        std::vector<uint8_t> high;
        hfk_generation request{};
    };

    // Whether a token is in any list of a live centroid, or in none yet.
    std::vector<bool> list_tokens(const hfk_step &step, int64_t b, int64_t h) const {
        std::vector<bool> listed(step.tokens, false);
        for (const Generation &part : generations_) {
            const hfk_generation &of = part.request;
            for (int64_t c = 0; c < of.count; ++c) {
                if (of.slots[b * of.slot_batch + c] < 0) continue;
                for (int64_t i = 0; i < lists_.width; ++i) {
                    const int64_t place = c * lists_.width + i;
                    int64_t token = of.low[b * of.low_batch + h * of.low_head + place];
                    if (of.high != nullptr) {
                        token += of.high[b * of.high_batch + h * of.high_head + place] << 16;
                    }
                    const int64_t run = i < lists_.following && token >= 1 ? lists_.following : 0;
                    for (int64_t t = token; t <= token + run; ++t) {
                        if (t >= 1 && t <= step.tokens) listed[t - 1] = true;
                    }
                }
            }
        }
        for (int64_t i = step.tokens - lists_.pending; i < step.tokens; ++i) listed[i] = true;
        return listed;
    }

    const char *judge(const hfk_step &step, const Numbers &query, const KeyNumber &key,
                      const std::vector<bool> &listed, int64_t b, int64_t h, int64_t q) const {
        const hfk_request &r = step.attention;
        const int64_t group = r.query_heads / r.id_heads;
        const int32_t *ids = r.ids + ((b * r.id_heads + h) * r.queries + q) * r.count;
        std::vector<std::vector<double>> scores(group);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t row = (b * r.query_heads + h * group + g) * r.queries + q;
            scores[g].assign(step.tokens, -kInf);
            for (int64_t token = 0; token < step.tokens; ++token) {
                if (!listed[token] || !step.valid[b * step.valid_stride + token]) continue;
                double sum = 0.0;
                for (int64_t d = 0; d < r.key_dim; ++d) {
                    sum += query[row * r.key_dim + d] * key(b, h, token, d);
                }
                if (!std::isnan(sum)) scores[g][token] = capped(sum * r.scale, r.softcap);
            }
        }
        double error = 0.0;
        const std::vector<double> relevance = group_relevance(scores, error);
        if (recalls_all_) return judge_best(ids, r.count, relevance, error);
        int64_t last = -1;
        for (int64_t k = 0; k < r.count; ++k) {
            if (ids[k] == -1) {
                last = step.tokens;
            } else if (ids[k] <= last || ids[k] >= step.tokens || relevance[ids[k]] == -kInf) {
                return "an id that is in no list";
            } else {
                last = ids[k];
            }
        }
        return nullptr;
    }

    std::vector<Generation> generations_;
    Numbers metric_;
    hfk_lists lists_{};
    bool recalls_all_;
};

} // namespace

std::unique_ptr<SearchCase> make_list_case(Random &random, hfk_step &step) {
    return std::make_unique<ListCase>(random, step);
}
