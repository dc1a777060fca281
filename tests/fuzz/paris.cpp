// ParisKV's search: each stage is held against plain arithmetic on what the one before it left.
#include <numeric>

#include "search_case.h"

namespace {

// Centroids that the points of one query may take, and points that the scan of one may add.
constexpr int64_t kTableWork = 6000, kScanWork = 500000;

class ParisCase : public SearchCase {
  public:
    ParisCase(Random &random, hfk_step &step) {
        hfk_request &r = step.attention;
        paris_.dim = 8;
        while (paris_.dim < r.key_dim || (paris_.dim < 256 && random.one_in(4))) paris_.dim *= 2;
        // Several blocks.
        if (random.one_in(3)) paris_.dim = random.pick((r.key_dim + 7) / 8, 80) * 8;
        const int64_t subspaces = paris_.dim / 8;
        // Points go by similarity without tiers, for at most 36 subspaces.
        const int64_t fewest = subspaces <= 36 ? 0 : 1;
        paris_.tiers = random.pick(fewest, std::min<int64_t>(15, 254 / subspaces));
        paris_.mean_query = random.one_in(3);
        group_ = r.query_heads / r.id_heads;
        tables_ = paris_.mean_query ? 1 : group_;
        if (r.batch * r.id_heads * r.queries * tables_ * paris_.dim > kTableWork) {
            r.batch = r.queries = 1;
        }
        selections_ = r.batch * r.id_heads * r.queries;
        step.tokens = pick_tokens(random, kScanWork / (selections_ * tables_ * paris_.dim / 8));
        paris_.candidates = random.one_in(4) ? step.tokens + random.pick(-1, 3)
                                             : random.pick(0, step.tokens);
        paris_.candidates = std::max<int64_t>(paris_.candidates, 0);
        make_codes(random, step);
        make_counts(random, step);
        paris_.block_len = int64_t{64} << random.pick(0, 3);
        blocks_ = (step.tokens + paris_.block_len - 1) / paris_.block_len;
        means_ = Numbers(r.batch * r.id_heads * blocks_ * r.key_dim, HFK_FLOAT32);
        means_.fill(random);
        if (random.one_in(2)) paris_.means = means_.floats();
        paris_.sample_count = random.pick(1, 20);
        samples_ = Numbers(r.batch * r.id_heads * paris_.sample_count * r.key_dim, HFK_FLOAT32);
        samples_.fill(random);
        if (r.scale > 0 && random.one_in(2)) paris_.samples = samples_.floats();
        paris_.worth = static_cast<float>(random.pick(0, 8)) / 4;
        signs_.resize(r.batch * r.id_heads * paris_.dim);
        for (float &sign : signs_) {
            sign = (random.one_in(2) ? 1.0f : -1.0f) * std::exp2(static_cast<float>(random.pick(-3, 3)));
        }
        levels_ = Numbers(8, HFK_FLOAT32);
        levels_.fill(random);
        shares_.resize(paris_.tiers);
        for (int64_t &share : shares_) share = random.one_in(8) ? 0 : random.pick(0, 1000000);
        paris_.signs = signs_.data();
        paris_.levels = levels_.floats();
        paris_.shares = shares_.data();
    }

    const void *request() const override { return &paris_; }

    const char *run(const hfk_step &step, const Numbers &query, const KeyNumber &) const override {
        const int64_t rows = selections_ * tables_;
        const float poison = std::numeric_limits<float>::quiet_NaN();
        Trace trace;
        trace.rotated.assign(rows * paris_.dim, poison);
        trace.points.assign(rows * paris_.dim / 8 * 256, 255);
        trace.drops.assign(rows * blocks_, 255);
        trace.scores.assign(selections_ * step.tokens, 255);
        trace.candidates.assign(selections_ * paris_.candidates, -7);
        trace.estimates.assign(rows * paris_.candidates, poison);
        const hfk_paris_trace request = {trace.rotated.data(), trace.points.data(),
                                         trace.drops.data(),   trace.scores.data(),
                                         trace.candidates.data(), trace.estimates.data()};
        if (hfk_search_ids(&step, &request) != HFK_OK) return "status of hfk_search_ids";
        const hfk_request &r = step.attention;
        for (int64_t place = 0; place < selections_; ++place) {
            const int64_t head = place / r.queries;
            for (int64_t g = 0; g < tables_; ++g) {
                const int64_t row = place * tables_ + g;
                if (!is_rotated(step, query, place, g, trace)) return "rotation";
                if (!has_points(head, row, trace)) return "points";
                if (!has_drops(step, query, place, g, trace)) return "drops";
            }
            if (!has_scores(step, place, trace)) return "scores of the scan";
            if (!has_candidates(step, place, trace)) return "candidates";
            std::vector<std::vector<double>> scores(tables_);
            for (int64_t g = 0; g < tables_; ++g) {
                if (!has_estimates(step, query, place, g, trace)) return "estimates";
                scores[g] = of_tokens(step.tokens, place, g, trace);
            }
            double error = 0.0;
            const std::vector<double> relevance = group_relevance(scores, error);
            const char *fault = judge_best(r.ids + place * r.count, r.count, relevance, error);
            if (fault != nullptr) return fault;
        }
        return nullptr;
    }

  private:
    struct Trace {
        std::vector<float> rotated, estimates;
        std::vector<uint8_t> points, drops, scores;
        std::vector<int32_t> candidates;
    };

    int64_t width() const { return paris_.dim / 2; }

    void make_codes(Random &random, const hfk_step &step) {
        const hfk_request &r = step.attention;
        const int64_t n = step.tokens;
        const auto plane = [&](int64_t width, int64_t &batch_stride, int64_t &head_stride) {
            head_stride = (n + (random.one_in(2) ? 0 : random.pick(0, 9))) * width;
            batch_stride = r.id_heads * head_stride;
            return (r.batch - 1) * batch_stride + (r.id_heads - 1) * head_stride + n * width;
        };
        sign_.resize(plane(paris_.dim / 8, paris_.sign_batch, paris_.sign_head));
        record_.resize(plane(width(), paris_.record_batch, paris_.record_head));
        // Few different bytes make tokens with equal points.
        const bool few = random.one_in(3);
        for (uint8_t &byte : sign_) byte = few ? random.byte() & 3 : random.byte();
        // Codes from 248 on are no finite weights.
        for (uint8_t &byte : record_) byte = random.byte() % 248;
        paris_.sign = sign_.data();
        paris_.record = record_.data();
    }

    void make_counts(Random &random, const hfk_step &step) {
        const hfk_request &r = step.attention;
        const int64_t subspaces = paris_.dim / 8;
        counts_.assign(r.batch * r.id_heads * subspaces * 256, 0);
        for (int64_t head = 0; head < r.batch * r.id_heads; ++head) {
            const uint8_t *sign = signs_of(step, head);
            for (int64_t i = 0; i < step.tokens; ++i) {
                if (random.one_in(5)) continue; // tokens that are no longer valid
                for (int64_t s = 0; s < subspaces; ++s) {
                    ++counts_[(head * subspaces + s) * 256 + sign[i * subspaces + s]];
                }
            }
        }
        paris_.counts = counts_.data();
    }

    // Where the codes of a head of a batch row begin.
    const uint8_t *signs_of(const hfk_step &step, int64_t head) const {
        const int64_t heads = step.attention.id_heads;
        return sign_.data() + head / heads * paris_.sign_batch + head % heads * paris_.sign_head;
    }

    // Sum of a group's queries, or one of them, at coordinate d.
    double query_at(const hfk_step &step, const Numbers &query, int64_t place, int64_t g,
                    int64_t d) const {
        const hfk_request &r = step.attention;
        const int64_t head = place / r.queries;
        const auto own = [&](int64_t i) {
            return query[((head * group_ + i) * r.queries + place % r.queries) * r.key_dim + d];
        };
        if (!paris_.mean_query) return own(g);
        double sum = 0.0;
        for (int64_t i = 0; i < group_; ++i) sum += own(i);
        return sum / static_cast<double>(group_);
    }

    // By the definition of Walsh-Hadamard matrices, one for each power of two in the dimension.
    bool is_rotated(const hfk_step &step, const Numbers &query, int64_t place, int64_t g,
                    const Trace &trace) const {
        const int64_t dim = paris_.dim, key_dim = step.attention.key_dim;
        int64_t stride = 1;
        if ((dim & (dim - 1)) != 0) {
            stride = static_cast<int64_t>(0.618 * static_cast<double>(dim));
            while (std::gcd(stride, dim) > 1) ++stride;
        }
        const float *signs = signs_.data() + place / step.attention.queries * dim;
        std::vector<double> spread(dim, 0.0);
        for (int64_t i = 0; i < dim; ++i) {
            const int64_t d = i * stride % dim;
            if (d < key_dim) spread[i] = query_at(step, query, place, g, d) * signs[i];
        }
        transform(spread);
        for (int64_t i = 0; i < dim; ++i) {
            if (!is_close(trace.rotated[(place * tables_ + g) * dim + i], spread[i])) return false;
        }
        return true;
    }

    // Exactly: similarities are sums of floats in the order of coordinates.
    std::vector<int> subspace_points(const float *query, int64_t head, int64_t subspace) const {
        const int32_t *own = counts_.data() + head * paris_.dim * 32;
        const int64_t total = std::accumulate(own, own + 256, int64_t{0});
        const int32_t *counts = own + subspace * 256;
        std::vector<float> similarity(256, 0.0f);
        for (int64_t c = 0; c < 256; ++c) {
            for (int64_t j = 0; j < 8; ++j) {
                const float x = query[subspace * 8 + j];
                similarity[c] += c >> j & 1 ? x : -x;
            }
        }
        std::vector<int> order(256), points(256, 0);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return similarity[a] > similarity[b]; });
        int64_t ahead = 0;
        for (int c : order) {
            for (int64_t share : shares_) points[c] += ahead < (total * share + 999999) / 1000000;
            ahead += counts[c];
        }
        return points;
    }

    // Product of a query and one of `count` keys of its head, and the size of its terms.
    std::pair<double, double> product_with(const hfk_step &step, const Numbers &query,
                                           int64_t place, int64_t g, const Numbers &keys,
                                           int64_t count, int64_t key) const {
        const int64_t head = place / step.attention.queries, dim = step.attention.key_dim;
        double sum = 0.0, size = 0.0;
        for (int64_t d = 0; d < dim; ++d) {
            const double term =
                query_at(step, query, place, g, d) * keys[(head * count + key) * dim + d];
            sum += term, size += std::abs(term);
        }
        return {sum, size};
    }

    // With the mean key of a block.
    std::pair<double, double> product(const hfk_step &step, const Numbers &query, int64_t place,
                                      int64_t g, int64_t block) const {
        if (paris_.means == nullptr) return {0.0, 0.0};
        return product_with(step, query, place, g, means_, blocks_, block);
    }

    // The logit that the selection of a query is taken to reach, in units of products.
    double least_log(const hfk_step &step, const Numbers &query, int64_t place,
                       int64_t g) const {
        if (paris_.samples == nullptr) return 0.0;
        const double scale = step.attention.scale;
        double peak = -kInf, total = 0.0;
        const auto logit = [&](int64_t i) {
            return product_with(step, query, place, g, samples_, paris_.sample_count, i).first * scale;
        };
        for (int64_t i = 0; i < paris_.sample_count; ++i) peak = std::max(peak, logit(i));
        for (int64_t i = 0; i < paris_.sample_count; ++i) total += std::exp(logit(i) - peak);
        const double share =
            std::max(0.0, std::log(static_cast<double>(step.tokens) / step.attention.count) - 2.0) -
            std::log(std::max(1.0, paris_.sample_count - 1.0));
        // But the largest sample.
        return (peak + std::log(std::max(total - 1.0, std::exp(-10.0))) + share) / scale;
    }

    // Within one point, as sums of floats have another order.
    bool has_drops(const hfk_step &step, const Numbers &query, int64_t place, int64_t g,
                   const Trace &trace) const {
        const bool sampled = paris_.samples != nullptr;
        const int64_t row = place * tables_ + g;
        // A unit has three bits behind the first one, which is as exact as its query.
        const auto unit = [&](int64_t other) {
            return static_cast<double>(scale_of(place * tables_ + other, trace, 1.0f)) * paris_.worth;
        };
        double best = -kInf;
        for (int64_t other = 0; other < tables_; ++other) {
            if (other != g && !sampled) continue;
            const double least = least_log(step, query, place, other);
            for (int64_t i = 0; i < blocks_; ++i) {
                const double level = product(step, query, place, other, i).first - least;
                if (std::isfinite(unit(other))) best = std::max(best, level * unit(other));
            }
        }
        const double least = least_log(step, query, place, g);
        for (int64_t i = 0; i < blocks_; ++i) {
            const double most = best - (product(step, query, place, g, i).first - least) * unit(g);
            const double got = trace.drops[row * blocks_ + i];
            const double slack = 1.0 + 1e-4 * (std::abs(most) + std::abs(best));
            if (!std::isfinite(most)) continue;
            if (got > most + slack || got < std::min(most * 0.87, 255.0) - slack) return false;
        }
        return true;
    }

    // `nudge` moves a scale across the step that it may lie on.
    float scale_of(int64_t row, const Trace &trace, float nudge) const {
        const float *query = trace.rotated.data() + row * paris_.dim;
        double squares = 0.0;
        for (int64_t d = 0; d < paris_.dim; ++d) squares += double(query[d]) * query[d];
        float scale = static_cast<float>(std::sqrt(paris_.dim / squares) * 2.0 / 3.0) * nudge;
        uint32_t bits;
        std::memcpy(&bits, &scale, sizeof bits);
        bits &= 0xfff00000;
        std::memcpy(&scale, &bits, sizeof bits);
        return scale;
    }

    // Points go by similarity.
    bool has_similar_points(int64_t row, const Trace &trace, float nudge) const {
        const float *query = trace.rotated.data() + row * paris_.dim;
        const float scale = scale_of(row, trace, nudge);
        for (int64_t i = 0; i < paris_.dim * 32; ++i) {
            const float *own = query + i / 256 * 8;
            float sim = 0.0f;
            for (int j = 0; j < 8; ++j) sim += i >> j & 1 ? own[j] : -own[j];
            const float points = std::floor(sim * scale) + 3.0f;
            const int want = points > 0.0f ? static_cast<int>(std::min(points, 7.0f)) : 0;
            if (trace.points[row * paris_.dim * 32 + i] != want) return false;
        }
        return true;
    }

    bool has_points(int64_t head, int64_t row, const Trace &trace) const {
        if (paris_.tiers == 0) {
            return has_similar_points(row, trace, 1.0f - 1e-5f) ||
                   has_similar_points(row, trace, 1.0f + 1e-5f);
        }
        const float *query = trace.rotated.data() + row * paris_.dim;
        for (int64_t byte = 0; byte < paris_.dim / 8; ++byte) {
            const uint8_t *got = trace.points.data() + (row * paris_.dim / 8 + byte) * 256;
            const std::vector<int> want = subspace_points(query, head, byte);
            if (!std::equal(want.begin(), want.end(), got)) return false;
        }
        return true;
    }

    bool has_scores(const hfk_step &step, int64_t place, const Trace &trace) const {
        const int64_t bytes = paris_.dim / 8, head = place / step.attention.queries;
        const uint8_t *valid =
            step.valid + head / step.attention.id_heads * step.valid_stride;
        for (int64_t i = 0; i < step.tokens; ++i) {
            const uint8_t *sign = signs_of(step, head) + i * bytes;
            int most = 0;
            for (int64_t g = 0; g < tables_; ++g) {
                int sum = 0;
                for (int64_t s = 0; s < bytes; ++s) {
                    sum += trace.points[((place * tables_ + g) * bytes + s) * 256 + sign[s]];
                }
                sum -= trace.drops[(place * tables_ + g) * blocks_ + i / paris_.block_len];
                most = std::max(most, sum);
            }
            const int want = valid[i] ? most + 1 : 0;
            if (trace.scores[place * step.tokens + i] != want) return false;
        }
        return true;
    }

    bool has_candidates(const hfk_step &step, int64_t place, const Trace &trace) const {
        const uint8_t *scores = trace.scores.data() + place * step.tokens;
        std::vector<int32_t> want;
        for (int32_t i = 0; i < step.tokens; ++i) {
            if (scores[i] > 0) want.push_back(i);
        }
        // Newer tokens are taken before older ones with equal scores.
        std::sort(want.begin(), want.end(), [&](int32_t a, int32_t b) {
            return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
        });
        if (static_cast<int64_t>(want.size()) > paris_.candidates) want.resize(paris_.candidates);
        std::sort(want.begin(), want.end());
        want.resize(paris_.candidates, -1);
        return std::equal(want.begin(), want.end(),
                          trace.candidates.begin() + place * paris_.candidates);
    }

    bool has_estimates(const hfk_step &step, const Numbers &query, int64_t place, int64_t g,
                       const Trace &trace) const {
        const hfk_request &r = step.attention;
        const int64_t head = place / r.queries, bytes = paris_.dim / 8;
        const int64_t batch = head / r.id_heads, own_head = head % r.id_heads;
        const uint8_t *records =
            record_.data() + batch * paris_.record_batch + own_head * paris_.record_head;
        const float *rotated = trace.rotated.data() + (place * tables_ + g) * paris_.dim;
        for (int64_t c = 0; c < paris_.candidates; ++c) {
            const int64_t id = trace.candidates[place * paris_.candidates + c];
            if (id < 0) break;
            auto [sum, size] = product(step, query, place, g, id / paris_.block_len);
            const uint8_t *own = records + id * width();
            for (int64_t d = 0; d < paris_.dim; ++d) {
                // Three bits for each coordinate, lowest first.
                int level = 0;
                for (int64_t bit = 3 * d; bit < 3 * d + 3; ++bit) {
                    level |= (own[bit / 8] >> bit % 8 & 1) << (bit - 3 * d);
                }
                const bool positive = signs_of(step, head)[bytes * id + d / 8] >> d % 8 & 1;
                const double value =
                    levels_[level] * weight_of(own[3 * bytes + d / 8]);
                const double term = rotated[d] * (positive ? value : -value);
                sum += term, size += std::abs(term);
            }
            const double want = capped(sum * r.scale, r.softcap);
            const double got =
                trace.estimates[(place * tables_ + g) * paris_.candidates + c];
            // fp32 sums of up to 640 terms, and what a cap's tanh is off.
            const double error = 1e-6 * (size * std::abs(r.scale) + r.softcap) + 1e-9;
            if (!(std::abs(got - want) <= error)) return false;
        }
        return true;
    }

    // Estimates at the places of their tokens.
    std::vector<double> of_tokens(int64_t tokens, int64_t place, int64_t g,
                                  const Trace &trace) const {
        std::vector<double> scores(tokens, -kInf);
        for (int64_t c = 0; c < paris_.candidates; ++c) {
            const int32_t id = trace.candidates[place * paris_.candidates + c];
            if (id >= 0) scores[id] = trace.estimates[(place * tables_ + g) * paris_.candidates + c];
        }
        return scores;
    }

    hfk_paris paris_{};
    int64_t group_, tables_, selections_, blocks_;
    std::vector<uint8_t> sign_, record_;
    Numbers means_, samples_, levels_;
    std::vector<int32_t> counts_;
    std::vector<float> signs_;
    std::vector<int64_t> shares_;
};

} // namespace

std::unique_ptr<SearchCase> make_paris_case(Random &random, hfk_step &step) {
    return std::make_unique<ParisCase>(random, step);
}
