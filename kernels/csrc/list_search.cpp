// CTkvr's search: the lists of the centroids nearest to a query, then exact scores of their tokens.
#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "search.h"

namespace {

constexpr float kNever = -__builtin_inff();

class ListSearch : public Search {
  public:
    ListSearch(const hfk_step &step, const Kernel &kernel)
        : step_(step), request_(step.attention),
          lists_(*static_cast<const hfk_lists *>(step.search)), kernel_(kernel),
          heads_(request_.query_heads / request_.id_heads),
          centroids_(lists_.generations[0].count + lists_.generations[1].count),
          nprobe_(std::min(lists_.nprobe, centroids_)),
          list_len_(lists_.width + lists_.following * std::min(lists_.width, lists_.following)),
          most_(std::min(step.tokens, nprobe_ * list_len_ + lists_.pending)),
          dim_stride_(row_stride(request_.key_dim)), centroid_stride_(row_stride(centroids_)),
          stride_(row_stride(most_)) {
        Cutter cutter;
        query_ = cutter.take<float>(request_.key_dim);
        units_ = cutter.take<float>(heads_ * dim_stride_);
        alive_ = cutter.take<uint8_t>(centroids_);
        cosines_ = cutter.take<float>(heads_ * centroid_stride_);
        similarity_ = cutter.take<float>(centroids_ + kSlack);
        nearest_ = cutter.take<int32_t>(nprobe_);
        marks_ = cutter.take<uint64_t>((step.tokens + 63) / 64);
        count_ = cutter.take<int64_t>(1);
        candidates_ = cutter.take<int32_t>(most_);
        scores_ = cutter.take<float>(heads_ * stride_);
        relevance_ = cutter.take<float>(most_ + kSlack);
        bytes_ = cutter.bytes();
    }

    int stages() const override { return 5; }
    bool is_split(int stage) const override { return stage == kCompare || stage == kScore; }
    int64_t bytes() const override { return bytes_; }

    bool run(int stage, const Selection &selection, char *work, float *scratch, int64_t chunk,
             int64_t chunks, int32_t *ids) const override {
        int32_t *candidates = at<int32_t>(work, candidates_);
        float *scores = at<float>(work, scores_);
        int64_t *count = at<int64_t>(work, count_);
        switch (stage) {
        case kPrepare:
            make_units(selection, work, scratch);
            find_alive(selection, at<uint8_t>(work, alive_));
            break;
        case kCompare:
            compare(selection, work, scratch, boundary(centroids_, chunk, chunks),
                    boundary(centroids_, chunk + 1, chunks));
            break;
        case kRecall:
            *count = recall(selection, work);
            break;
        case kScore: {
            const Span span = {selection.batch, selection.head, selection.query, candidates,
                               boundary(*count, chunk, chunks),
                               boundary(*count, chunk + 1, chunks), 0, 0};
            // A token without a row has the score -inf.
            kernel_.score(request_, span, scratch, scores, stride_);
            break;
        }
        default: {
            float *relevance = at<float>(work, relevance_);
            kernel_.relevance(scores, heads_, stride_, *count, relevance);
            kernel_.best(relevance, *count, candidates, request_.count, ids);
        }
        }
        return true;
    }

  private:
    enum { kPrepare, kCompare, kRecall, kScore };

    // The group's queries in fp32, times the metric and over their lengths in it.
    void make_units(const Selection &selection, char *work, float *scratch) const {
        const int64_t dim = request_.key_dim;
        float *query = at<float>(work, query_), *unit = at<float>(work, units_);
        ProxyScores images{};
        images.heads = 1, images.queries[0] = query;
        images.dtype = HFK_FLOAT32, images.rank = dim, images.row_bytes = dim * sizeof(float);
        images.last = dim, images.stride = dim_stride_, images.scratch = scratch;
        if (lists_.metric != nullptr) {
            images.rows = lists_.metric + selection.batch * lists_.metric_batch +
                          selection.head * lists_.metric_head;
        }
        for (int64_t g = 0; g < heads_; ++g, unit += dim_stride_) {
            const int64_t head =
                selection.batch * request_.query_heads + selection.head * heads_ + g;
            const int64_t first = (head * request_.queries + selection.query) * dim;
            for (int64_t d = 0; d < dim; ++d) {
                query[d] = number_at(request_.query, request_.dtype, first + d);
            }
            images.out = unit;
            if (images.rows == nullptr) {
                std::copy(query, query + dim, unit);
            } else {
                kernel_.proxy_scores(images);
            }
            float square = 0.0f;
            for (int64_t d = 0; d < dim; ++d) square += query[d] * unit[d];
            const float length = std::sqrt(std::max(square, 1e-24f));
            for (int64_t d = 0; d < dim; ++d) unit[d] /= length;
        }
    }

    void find_alive(const Selection &selection, uint8_t *alive) const {
        for (const hfk_generation &part : lists_.generations) {
            const int64_t *slots = part.slots + selection.batch * part.slot_batch;
            for (int64_t c = 0; c < part.count; ++c) *alive++ = slots[c] >= 0;
        }
    }

    // Dot products of each head's query with its part of the centroids `first .. last`.
    void compare(const Selection &selection, char *work, float *scratch, int64_t first,
                 int64_t last) const {
        const int64_t dim = request_.key_dim, size = request_.dtype == HFK_FLOAT32 ? 4 : 2;
        ProxyScores products{};
        products.heads = 1;
        products.dtype = request_.dtype, products.rank = dim;
        products.row_bytes = heads_ * dim * size;
        products.scratch = scratch, products.stride = centroid_stride_;
        int64_t start = 0; // of the generation's centroids among all
        for (const hfk_generation &part : lists_.generations) {
            products.first = std::max(first - start, int64_t{0});
            products.last = std::min(last - start, part.count);
            if (products.first < products.last) {
                products.valid = at<uint8_t>(work, alive_) + start;
                for (int64_t g = 0; g < heads_; ++g) {
                    products.queries[0] = at<float>(work, units_) + g * dim_stride_;
                    products.rows = static_cast<const char *>(part.queries) +
                                    (selection.batch * part.query_batch +
                                     selection.head * part.query_head + g * dim) * size;
                    products.out = at<float>(work, cosines_) + g * centroid_stride_ + start;
                    kernel_.proxy_scores(products);
                }
            }
            start += part.count;
        }
    }

    // Tokens of the nearest centroids' lists and those that are in no list yet, ascending, each
    // once. Returns how many there are.
    int64_t recall(const Selection &selection, char *work) const {
        const float *cosines = at<float>(work, cosines_);
        const uint8_t *alive = at<uint8_t>(work, alive_);
        float *similarity = at<float>(work, similarity_);
        int64_t start = 0;
        for (const hfk_generation &part : lists_.generations) {
            const float *inverse = part.inverse + selection.batch * part.inverse_batch +
                                   selection.head * part.inverse_head;
            for (int64_t c = 0; c < part.count; ++c) {
                float &result = similarity[start + c];
                result = alive[start + c] && !lists_.largest ? 0.0f : kNever;
                for (int64_t g = 0; alive[start + c] && g < heads_; ++g) {
                    const float cosine = cosines[g * centroid_stride_ + start + c] *
                                         inverse[c * heads_ + g];
                    result = lists_.largest ? std::max(result, cosine) : result + cosine;
                }
            }
            start += part.count;
        }
        int32_t *nearest = at<int32_t>(work, nearest_);
        kernel_.best(similarity, centroids_, nullptr, nprobe_, nearest);

        uint64_t *marks = at<uint64_t>(work, marks_);
        const int64_t words = (step_.tokens + 63) / 64;
        std::fill(marks, marks + words, 0);
        for (int64_t i = 0; i < nprobe_; ++i) {
            if (nearest[i] >= 0) mark_list(selection, nearest[i], marks);
        }
        const uint8_t *valid = step_.valid + selection.batch * step_.valid_stride;
        for (int64_t token = step_.tokens - lists_.pending; token < step_.tokens; ++token) {
            marks[token / 64] |= uint64_t{1} << token % 64;
        }
        int32_t *to = at<int32_t>(work, candidates_);
        int64_t count = 0;
        for (int64_t w = 0; w < words; ++w) {
            for (uint64_t rest = marks[w]; rest != 0; rest &= rest - 1) {
                const int64_t token = 64 * w + __builtin_ctzll(rest);
                if (valid[token]) to[count++] = static_cast<int32_t>(token);
            }
        }
        return count;
    }

    // A list holds each token plus 1, and 0 for none.
    void mark_list(const Selection &selection, int64_t centroid, uint64_t *marks) const {
        const hfk_generation &older = lists_.generations[0];
        const bool is_older = centroid < older.count;
        const hfk_generation &part = is_older ? older : lists_.generations[1];
        const int64_t row = (is_older ? centroid : centroid - older.count) * lists_.width;
        const uint16_t *low = part.low + selection.batch * part.low_batch +
                              selection.head * part.low_head + row;
        const uint8_t *high = nullptr;
        if (part.high != nullptr) {
            high = part.high + selection.batch * part.high_batch +
                   selection.head * part.high_head + row;
        }
        for (int64_t i = 0; i < lists_.width; ++i) {
            const int64_t token = (low[i] | (high == nullptr ? 0 : high[i] << 16)) - 1;
            if (token < 0) continue;
            const int64_t run = i < lists_.following ? lists_.following : 0;
            for (int64_t id = token; id <= token + run && id < step_.tokens; ++id) {
                marks[id / 64] |= uint64_t{1} << id % 64;
            }
        }
    }

    const hfk_step &step_;
    const hfk_request &request_;
    const hfk_lists &lists_;
    const Kernel &kernel_;
    // Query heads of a group; centroids, and how many are recalled; tokens that one names, and
    // candidates, at most; strides of heads.
    const int64_t heads_, centroids_, nprobe_, list_len_, most_, dim_stride_, centroid_stride_,
        stride_;
    int64_t query_, units_, alive_, cosines_, similarity_, nearest_, marks_, count_, candidates_,
        scores_, relevance_, bytes_;
};

bool is_good(const hfk_lists &lists, const hfk_step &step) {
    for (const hfk_generation &part : lists.generations) {
        if (part.count < 0) return false;
    }
    return lists.width > 0 && lists.nprobe > 0 && lists.following >= 0 && lists.pending >= 0 &&
           lists.pending <= step.tokens;
}

} // namespace

std::unique_ptr<Search> make_list_search(const hfk_step &step, const Kernel &kernel) {
    if (!is_good(*static_cast<const hfk_lists *>(step.search), step)) return nullptr;
    return std::make_unique<ListSearch>(step, kernel);
}
