// A token that stands for what the ids of a step leave out; layer/cold_sums.py has its meaning.
#pragma once

#include <cmath>
#include <limits>

#include "numbers.h"
#include "search.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRootHalf = 0.70710678118654752, kRootTwoPi = 2.5066282746310005;

// Returns the logarithm of the normal distribution function.
inline double log_below(double x) {
    if (x > -30.0) return std::log(0.5 * std::erfc(-kRootHalf * x));
    return -0.5 * x * x - std::log(-x * kRootTwoPi) + std::log1p(-1.0 / (x * x));
}

// Returns the number that a share of a normal distribution is above.
inline double bound_of(double share) {
    if (share <= 0.0 || share >= 1.0) return share < 0.5 ? kInfinity : -kInfinity;
    // Selections of a step mostly have one share.
    thread_local double known = -1.0, bound = 0.0;
    if (share == known) return bound;
    double low = -40.0, high = 40.0;
    while (high - low > 1e-9) {
        bound = 0.5 * (low + high);
        (0.5 * std::erfc(kRootHalf * bound) > share ? low : high) = bound;
    }
    known = share;
    return bound;
}

class Rest {
  public:
    Rest(const hfk_step &step, const Kernel &kernel)
        : rest_(step.rest), request_(step.attention), kernel_(kernel) {
        product_.tokens = request_.query_heads / request_.id_heads;
        product_.depth = request_.key_dim;
        product_.dtype = HFK_FLOAT32;
        product_.outputs = 1 + request_.key_dim + request_.value_dim;
        query_ = cutter_.take<float>(product_.tokens * product_.depth);
        along_ = cutter_.take<float>(product_.tokens * product_.outputs);
        room_ = cutter_.take<float>(product_.tokens * product_stride(product_) + kSlack);
    }

    // A selection needs so much work space.
    int64_t bytes() const { return rest_ == nullptr ? 0 : cutter_.bytes(); }

    // Merges it into `out` and `lse`, which are those of the selection's first query head.
    void add(const Selection &selection, const int32_t *ids, char *work, float *out, float *lse) {
        const int64_t dim = request_.key_dim, value_dim = request_.value_dim;
        const int64_t head = selection.batch * request_.kv_heads +
                             selection.head * request_.kv_heads / request_.id_heads;
        float *query = at<float>(work, query_), *along = at<float>(work, along_);
        for (int64_t g = 0; g < product_.tokens; ++g) {
            const int64_t row = (selection.batch * request_.query_heads +
                                 selection.head * product_.tokens + g) * request_.queries +
                                selection.query;
            for (int64_t d = 0; d < dim; ++d) {
                query[g * dim + d] = static_cast<float>(request_.scale) *
                                     number_at(request_.query, request_.dtype, row * dim + d);
            }
        }
        product_.x = query;
        product_.out = along;
        product_.weight = rest_->moments + head * product_.outputs * dim;
        kernel_.product(product_, 0, product_.outputs, at<float>(work, room_));
        const double count = static_cast<double>(rest_->counts[selection.batch]);
        int64_t chosen = 0;
        for (int64_t i = 0; i < request_.count; ++i) chosen += ids[i] >= 0;
        const double bound = bound_of(static_cast<double>(chosen) / std::max(count, 1.0));
        for (int64_t g = 0; g < product_.tokens; ++g) {
            merge(query + g * dim, along + g * product_.outputs, rest_->values + head * value_dim,
                  bound, count, out + g * request_.queries * value_dim, lse[g * request_.queries]);
        }
    }

  private:
    void merge(const float *query, const float *along, const float *values, double bound,
               double count, float *out, float &lse) const {
        constexpr double kLeastSpread = 1e-3;
        const float *to_keys = along + 1, *to_values = to_keys + request_.key_dim;
        double score = along[0], slope = 1.0, variance = 0.0;
        if (request_.softcap != 0.0) {
            // It is taken as straight around the mean.
            const double share = std::tanh(score / request_.softcap);
            score = share * request_.softcap;
            slope = 1.0 - share * share;
        }
        for (int64_t d = 0; d < request_.key_dim; ++d) variance += query[d] * to_keys[d];
        const double spread = variance < 0.0 ? 0.0 : slope * std::sqrt(variance);
        bound -= spread;
        const double below = log_below(bound);
        const double own = score + 0.5 * spread * spread + std::log(count) + below;
        if (own == -kInfinity) return;
        const double ratio = std::exp(-0.5 * bound * bound - below) / kRootTwoPi;
        const double gain = slope * (1.0 - ratio / std::max(spread, kLeastSpread));
        const double most = std::max<double>(own, lse);
        const double weight = std::exp(own - most), others = std::exp(lse - most);
        for (int64_t d = 0; d < request_.value_dim; ++d) {
            const double value = values[d] + gain * to_values[d];
            out[d] = static_cast<float>((others * out[d] + weight * value) / (others + weight));
        }
        lse = static_cast<float>(most + std::log(others + weight));
    }

    const hfk_rest *rest_;
    const hfk_request &request_;
    const Kernel &kernel_;
    hfk_product product_{};
    Cutter cutter_;
    int64_t query_, along_, room_;
};

} // namespace
