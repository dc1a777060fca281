// Searches that score every token, and choose the most relevant ones.
#include <algorithm>
#include <iterator>

#include "search.h"

namespace {

class ScoredSearch : public Search {
  public:
    int stages() const override { return 2; }
    bool is_split(int stage) const override { return stage == 0; }
    int64_t bytes() const override { return bytes_; }

    bool run(int stage, const Selection &selection, char *work, float *scratch, int64_t chunk,
             int64_t chunks, int32_t *ids) const override {
        float *scores = at<float>(work, scores_);
        if (stage == 0) {
            return score(selection, boundary(step_.tokens, chunk, chunks),
                         boundary(step_.tokens, chunk + 1, chunks), scratch, scores);
        }
        float *relevance = at<float>(work, relevance_);
        kernel_.relevance(scores, heads_, stride_, step_.tokens, relevance);
        kernel_.best(relevance, step_.tokens, nullptr, step_.attention.count, ids);
        return true;
    }

  protected:
    ScoredSearch(const hfk_step &step, const Kernel &kernel)
        : step_(step), kernel_(kernel),
          heads_(step.attention.query_heads / step.attention.id_heads),
          stride_(row_stride(step.tokens)) {
        Cutter cutter;
        scores_ = cutter.take<float>(heads_ * stride_);
        relevance_ = cutter.take<float>(step.tokens + kSlack);
        bytes_ = cutter.bytes();
    }

    // Scores [heads_, stride_] of the tokens `first .. last`; -inf for those that are not valid.
    // False as of `run`.
    virtual bool score(const Selection &selection, int64_t first, int64_t last, float *scratch,
                       float *scores) const = 0;

    const uint8_t *valid(const Selection &selection) const {
        return step_.valid + selection.batch * step_.valid_stride;
    }

    // Returns the row of head g of the group among all queries.
    int64_t query_row(const Selection &selection, int64_t g) const {
        const hfk_request &request = step_.attention;
        const int64_t head = selection.batch * request.query_heads + selection.head * heads_ + g;
        return head * request.queries + selection.query;
    }

    const hfk_step &step_;
    const Kernel &kernel_;
    const int64_t heads_, stride_;

  private:
    int64_t scores_, relevance_, bytes_;
};

// By the keys themselves.
class FlatSearch : public ScoredSearch {
  public:
    FlatSearch(const hfk_step &step, const Kernel &kernel)
        : ScoredSearch(step, kernel), flat_(*static_cast<const hfk_flat *>(step.search)) {}

  private:
    bool score(const Selection &selection, int64_t first, int64_t last, float *scratch,
               float *scores) const override {
        const hfk_request &request = step_.attention;
        const int64_t size = request.dtype == HFK_FLOAT32 ? 4 : 2;
        const char *keys = static_cast<const char *>(flat_.keys) +
                           (selection.batch * flat_.batch_stride +
                            selection.head * flat_.head_stride) * size;
        const Span span = {selection.batch, selection.head, selection.query, nullptr, first, last,
                           0, 0};
        kernel_.dense_scores(request, span, keys, valid(selection), scratch, scores, stride_);
        return true;
    }

    const hfk_flat &flat_;
};

// By proxies of queries and keys.
class ProxySearch : public ScoredSearch {
  public:
    ProxySearch(const hfk_step &step, const Kernel &kernel)
        : ScoredSearch(step, kernel), proxy_(*static_cast<const hfk_proxy *>(step.search)) {}

  private:
    bool score(const Selection &selection, int64_t first, int64_t last, float *scratch,
               float *scores) const override {
        const int64_t size = proxy_.dtype == HFK_FLOAT32 ? 4 : proxy_.dtype == HFK_INT8 ? 1 : 2;
        const int64_t heads_of_set = step_.attention.query_heads / proxy_.sets;
        ProxyScores part{};
        part.dtype = proxy_.dtype, part.rank = proxy_.rank, part.row_bytes = proxy_.rank * size;
        part.first = first, part.last = last;
        part.valid = valid(selection);
        part.softcap = static_cast<float>(step_.attention.softcap);
        part.scratch = scratch, part.stride = stride_;
        // The group's heads that read one set, at most as many as go together.
        for (int64_t g = 0; g < heads_; g += part.heads) {
            const int64_t head = selection.head * heads_ + g;
            const int64_t set = head / heads_of_set;
            part.heads = std::min({heads_ - g, heads_of_set - head % heads_of_set,
                                   static_cast<int64_t>(std::size(part.queries))});
            for (int64_t i = 0; i < part.heads; ++i) {
                const int64_t row = query_row(selection, g + i);
                part.queries[i] = proxy_.query + row * proxy_.rank;
                part.offsets[i] = proxy_.offset == nullptr ? 0.0f : proxy_.offset[row];
            }
            part.rows = static_cast<const char *>(proxy_.rows) +
                        (selection.batch * proxy_.batch_stride + set * proxy_.set_stride) * size;
            part.out = scores + g * stride_;
            kernel_.proxy_scores(part);
        }
        return true;
    }

    const hfk_proxy &proxy_;
};

// By the scores of codewords, one for each token.
class CodebookSearch : public ScoredSearch {
  public:
    CodebookSearch(const hfk_step &step, const Kernel &kernel)
        : ScoredSearch(step, kernel), book_(*static_cast<const hfk_codebook *>(step.search)) {}

  private:
    bool score(const Selection &selection, int64_t first, int64_t last, float *,
               float *scores) const override {
        const uint16_t *codes = book_.codes + selection.batch * book_.batch_stride +
                                selection.head * book_.head_stride;
        const uint8_t *seen = valid(selection);
        const uint16_t words = static_cast<uint16_t>(book_.words);
        // Before the look-ups, as a loop that the compiler makes vectors of.
        uint16_t wrong = 0;
        for (int64_t i = first; i < last; ++i) wrong |= (codes[i] >= words) & (seen[i] != 0);
        if (wrong != 0) return false;
        for (int64_t g = 0; g < heads_; ++g) {
            const float *table = book_.table + query_row(selection, g) * book_.words;
            float *to = scores + g * stride_;
            for (int64_t i = first; i < last; ++i) {
                to[i] = seen[i] ? table[codes[i]] : kNever;
            }
        }
        return true;
    }

    static constexpr float kNever = -__builtin_inff();

    const hfk_codebook &book_;
};

} // namespace

std::unique_ptr<Search> make_flat_search(const hfk_step &step, const Kernel &kernel) {
    return std::make_unique<FlatSearch>(step, kernel);
}

std::unique_ptr<Search> make_proxy_search(const hfk_step &step, const Kernel &kernel) {
    const hfk_proxy &proxy = *static_cast<const hfk_proxy *>(step.search);
    const hfk_request &request = step.attention;
    const bool is_good = proxy.dtype >= HFK_FLOAT32 && proxy.dtype <= HFK_INT8 && proxy.rank > 0 &&
                         proxy.rank <= request.key_dim && proxy.sets > 0 &&
                         request.query_heads % proxy.sets == 0;
    if (!is_good) return nullptr;
    return std::make_unique<ProxySearch>(step, kernel);
}

std::unique_ptr<Search> make_codebook_search(const hfk_step &step, const Kernel &kernel) {
    const hfk_codebook &book = *static_cast<const hfk_codebook *>(step.search);
    if (book.words < 1 || book.words > 1 << 15) return nullptr;
    return std::make_unique<CodebookSearch>(step, kernel);
}
