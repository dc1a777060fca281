// The best of some tokens by their scores: what a rerank does after scoring.
#include <numeric>

#include "job.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class Ranking {
  public:
    Ranking(const hfk_ranking &request, const Kernel &kernel)
        : request_(request), kernel_(kernel), heads_(request.query_heads / request.id_heads) {}

    void run() {
        const int64_t items = request_.batch * request_.id_heads * request_.queries;
        if (items == 0 || request_.wanted == 0) return;
        const int slots = std::clamp(request_.threads, 1, kMostThreads);
        relevance_.resize(slots * request_.count);
        weights_.resize(slots * request_.count);
        order_.resize(slots * request_.count);
        Pool::instance().run(items, slots, *this);
    }

    void work(int64_t item, int slot) {
        const int64_t count = request_.count, wanted = request_.wanted;
        const int64_t query = item % request_.queries;
        const int64_t group = item / request_.queries;
        const int32_t *ids = request_.ids + item * count;
        int32_t *best = request_.best + item * wanted;
        float *relevance = relevance_.data() + slot * count;
        int32_t *order = order_.data() + slot * count;
        std::fill(relevance, relevance + count, -kInf);
        for (int64_t g = 0; g < heads_; ++g) {
            const int64_t row = (group * heads_ + g) * request_.queries + query;
            const float *scores = request_.scores + row * count;
            const float lse = heads_ == 1 ? 0.0f : log_sum(scores, weights_.data() + slot * count);
            // Where a score is infinite, only such scores count.
            for (int64_t k = 0; k < count; ++k) {
                const float share =
                    lse == kInf ? (scores[k] == kInf ? 0.0f : -kInf) : scores[k] - lse;
                if (share > relevance[k]) relevance[k] = share;
            }
        }
        int64_t found = 0;
        for (int64_t k = 0; k < count; ++k) {
            if (ids[k] >= 0 && relevance[k] > -kInf) order[found++] = static_cast<int32_t>(k);
        }
        const auto better = [&](int32_t a, int32_t b) {
            return relevance[a] != relevance[b] ? relevance[a] > relevance[b] : a < b;
        };
        const int64_t kept = std::min(found, wanted);
        if (kept < found) std::nth_element(order, order + kept, order + found, better);
        std::sort(order, order + kept, better);
        for (int64_t k = 0; k < kept; ++k) best[k] = ids[order[k]];
        std::fill(best + kept, best + wanted, -1);
    }

  private:
    // Natural log of the sum of exp; NaN is left out. -inf without a score becomes 0, as nothing is
    // compared with it.
    float log_sum(const float *scores, float *weights) const {
        const int64_t count = request_.count;
        float largest = -kInf;
        for (int64_t k = 0; k < count; ++k) largest = scores[k] > largest ? scores[k] : largest;
        if (largest == kInf) return kInf;
        if (largest == -kInf) return 0.0f;
        for (int64_t k = 0; k < count; ++k) {
            weights[k] = scores[k] <= largest ? scores[k] - largest : -kInf;
        }
        kernel_.exp(weights, weights, count);
        return largest + static_cast<float>(std::log(std::accumulate(weights, weights + count, 0.0)));
    }

    const hfk_ranking &request_;
    const Kernel &kernel_;
    const int64_t heads_;
    std::vector<float> relevance_, weights_;
    std::vector<int32_t> order_;
};

bool is_good(const hfk_ranking &request) {
    return request.batch >= 0 && request.queries >= 0 && request.count >= 0 &&
           request.wanted >= 0 && request.id_heads > 0 &&
           request.query_heads % request.id_heads == 0 && request.query_heads > 0;
}

} // namespace

int32_t hfk_rank(const hfk_ranking *request) {
    return serve(is_good(*request), request->path, [request](const Kernel &kernel) {
        Ranking(*request, kernel).run();
        return HFK_OK;
    });
}
