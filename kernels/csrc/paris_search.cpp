// ParisKV's search. See paris/naive.py for the meaning.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "numbers.h"
#include "search.h"

namespace {

constexpr int64_t kMostDim = 1024;
constexpr float kInf = std::numeric_limits<float>::infinity();

class ParisSearch : public Search {
  public:
    ParisSearch(const hfk_step &step, const hfk_paris &paris, const Kernel &kernel)
        : step_(step), paris_(paris), kernel_(kernel),
          heads_(step.attention.query_heads / step.attention.id_heads),
          tables_(paris.mean_query ? 1 : heads_), row_bytes_(paris.dim / 8),
          stride_(row_stride(paris.candidates)),
          blocks_((step.tokens + paris.block_len - 1) / paris.block_len),
          offset_stride_(row_stride(blocks_)), sample_stride_(row_stride(paris.sample_count)),
          drop_stride_((tables_ + 7) / 8 * 8) {
        Cutter cutter;
        rotated_ = cutter.take<float>(tables_ * paris.dim);
        offsets_ = cutter.take<float>(tables_ * offset_stride_);
        samples_ = cutter.take<float>(tables_ * sample_stride_);
        drops_ = cutter.take<uint8_t>(blocks_ * drop_stride_);
        points_ = cutter.take<uint8_t>(tables_ * row_bytes_ * 256);
        packed_ = cutter.take<char>(kernel.packed_bytes(tables(nullptr)));
        scores_ = cutter.take<uint8_t>(step.tokens + kSlack);
        count_ = cutter.take<int64_t>(1);
        candidates_ = cutter.take<int32_t>(paris.candidates + kSlack);
        estimates_ = cutter.take<float>(tables_ * stride_);
        relevance_ = cutter.take<float>(paris.candidates + kSlack);
        bytes_ = cutter.bytes();
    }

    int stages() const override { return 6; }
    bool is_split(int stage) const override {
        return (stage == kTables && tables_ > 1) || stage == kScan || stage == kRerank;
    }
    int64_t bytes() const override { return bytes_; }

    bool run(int stage, const Selection &selection, char *work, float *scratch, int64_t chunk,
             int64_t chunks, int32_t *ids) const override {
        const int64_t head = selection.batch * step_.attention.id_heads + selection.head;
        int64_t *count = at<int64_t>(work, count_);
        int32_t *candidates = at<int32_t>(work, candidates_);
        uint8_t *scores = at<uint8_t>(work, scores_);
        switch (stage) {
        case kTables: {
            const int64_t first = tables_ * chunk / chunks, last = tables_ * (chunk + 1) / chunks;
            for (int64_t g = first; g < last; ++g) {
                float *query = at<float>(work, rotated_) + g * paris_.dim;
                read_query(selection, g, query);
                multiply(query, paris_.means, head, blocks_, scratch,
                         at<float>(work, offsets_) + g * offset_stride_);
                multiply(query, paris_.samples, head, paris_.sample_count, scratch,
                         at<float>(work, samples_) + g * sample_stride_);
                rotate(head, query);
            }
            make_tables(head, work, first, last);
            break;
        }
        case kPack:
            make_drops(work);
            kernel_.pack(tables(work));
            break;
        case kScan: {
            const int64_t last = boundary(step_.tokens, chunk + 1, chunks);
            for (int64_t i = boundary(step_.tokens, chunk, chunks), end; i < last; i = end) {
                const int64_t block = i / paris_.block_len;
                end = std::min(last, (block + 1) * paris_.block_len);
                PointTables own = tables(work);
                own.drops += block * drop_stride_;
                kernel_.scan(own, sign(selection),
                             step_.valid + selection.batch * step_.valid_stride, i, end, scores);
            }
            break;
        }
        case kCandidates:
            std::fill(scores + step_.tokens, scores + step_.tokens + kSlack, 0);
            *count = kernel_.candidates(scores, step_.tokens, paris_.candidates, candidates);
            break;
        case kRerank:
            rerank(selection, work, boundary(*count, chunk, chunks),
                   boundary(*count, chunk + 1, chunks));
            break;
        default: {
            float *relevance = at<float>(work, relevance_);
            kernel_.relevance(at<float>(work, estimates_), tables_, stride_, *count, relevance);
            kernel_.best(relevance, *count, candidates, step_.attention.count, ids);
        }
        }
        return true;
    }

    void trace(const Selection &selection, const char *work, const hfk_paris_trace &trace) const {
        const hfk_request &request = step_.attention;
        const int64_t place = (selection.batch * request.id_heads + selection.head) *
                                  request.queries + selection.query;
        const auto copy = [work](auto *to, int64_t first, int64_t from, int64_t count) {
            if (to != nullptr) std::memcpy(to + first, work + from, count * sizeof *to);
        };
        const int64_t dims = tables_ * paris_.dim, entries = tables_ * row_bytes_ * 256;
        copy(trace.rotated, place * dims, rotated_, dims);
        copy(trace.points, place * entries, points_, entries);
        for (int64_t i = 0; trace.drops != nullptr && i < tables_ * blocks_; ++i) {
            trace.drops[place * tables_ * blocks_ + i] = static_cast<uint8_t>(
                work[drops_ + i % blocks_ * drop_stride_ + i / blocks_]);
        }
        copy(trace.scores, place * step_.tokens, scores_, step_.tokens);
        int64_t count;
        std::memcpy(&count, work + count_, sizeof count);
        if (trace.candidates != nullptr) {
            int32_t *to = trace.candidates + place * paris_.candidates;
            std::fill(to, to + paris_.candidates, -1);
            copy(to, 0, candidates_, count);
        }
        for (int64_t g = 0; g < tables_; ++g) {
            copy(trace.estimates, (place * tables_ + g) * paris_.candidates,
                 estimates_ + g * stride_ * static_cast<int64_t>(sizeof(float)), count);
        }
    }

  private:
    enum { kTables, kPack, kScan, kCandidates, kRerank };

    const uint8_t *sign(const Selection &selection) const {
        return paris_.sign + selection.batch * paris_.sign_batch +
               selection.head * paris_.sign_head;
    }

    PointTables tables(char *work) const {
        const int64_t most = paris_.tiers == 0 ? kMostSimilar : paris_.tiers;
        if (work == nullptr) return {tables_, row_bytes_, most, nullptr, nullptr, nullptr};
        return {tables_, row_bytes_, most, at<uint8_t>(work, points_), at<uint8_t>(work, drops_),
                work + packed_};
    }

    // Reads a query of the group, or the mean of all.
    void read_query(const Selection &selection, int64_t g, float *to) const {
        const hfk_request &request = step_.attention;
        std::fill(to, to + paris_.dim, 0.0f);
        const int64_t last = paris_.mean_query ? heads_ : g + 1;
        for (int64_t i = paris_.mean_query ? 0 : g; i < last; ++i) {
            const int64_t row = (selection.batch * request.query_heads + selection.head * heads_ +
                                 i) * request.queries + selection.query;
            for (int64_t d = 0; d < request.key_dim; ++d) {
                to[d] += number_at(request.query, request.dtype, row * request.key_dim + d);
            }
        }
        for (int64_t d = 0; paris_.mean_query && d < request.key_dim; ++d) {
            to[d] /= static_cast<float>(heads_);
        }
    }

    // Products of a query and `count` keys of a head, or zeros without `keys`.
    void multiply(const float *query, const float *keys, int64_t head, int64_t count, float *scratch,
                  float *out) const {
        std::fill(out, out + count, 0.0f);
        if (keys == nullptr) return;
        const int64_t dim = step_.attention.key_dim;
        ProxyScores products{};
        products.dtype = HFK_FLOAT32, products.heads = 1;
        products.rank = dim, products.row_bytes = dim * static_cast<int64_t>(sizeof(float));
        products.rows = keys + head * count * dim;
        products.last = count;
        products.scratch = scratch, products.stride = row_stride(count);
        products.queries[0] = query, products.out = out;
        kernel_.proxy_scores(products);
    }

    // Multiplies a query by the signs and transforms it (Walsh-Hadamard).
    void rotate(int64_t head, float *x) const {
        const float *signs = paris_.signs + head * paris_.dim;
        const int64_t filled = spread(x, step_.attention.key_dim, paris_.dim);
        for (int64_t i = 0; i < filled; ++i) x[i] *= signs[i];
        // Powers of two that add up to the dimension, the largest first.
        for (int64_t left = paris_.dim; left > 0;) {
            int64_t block = 8;
            while (2 * block <= left) block *= 2;
            transform(x, block);
            x += block, left -= block;
        }
    }

    // Place i takes number i * stride: see rotation_stride in paris/codes.py. Returns how many may be
    // other than 0.
    static int64_t spread(float *x, int64_t key_dim, int64_t dim) {
        if ((dim & (dim - 1)) == 0) return key_dim;
        int64_t stride = static_cast<int64_t>(0.618 * static_cast<double>(dim));
        while (std::gcd(stride, dim) > 1) ++stride;
        float from[kMostDim];
        std::copy(x, x + dim, from);
        for (int64_t i = 0; i < dim; ++i) x[i] = from[i * stride % dim];
        return dim;
    }

    // The normalized Walsh-Hadamard transform.
    static void transform(float *x, int64_t dim) {
        for (int64_t half = 1; half < dim; half *= 2) {
            for (int64_t i = 0; i < dim; i += 2 * half) {
                for (int64_t j = i; j < i + half; ++j) {
                    const float a = x[j], b = x[j + half];
                    x[j] = a + b, x[j + half] = a - b;
                }
            }
        }
        const float factor = 1.0f / std::sqrt(static_cast<float>(dim));
        for (int64_t d = 0; d < dim; ++d) x[d] *= factor;
    }

    // Points for a similarity of 1. It has three bits behind the first one, see paris/naive.py.
    static float similarity_scale(const float *query, int64_t dim) {
        double squares = 0.0;
        for (int64_t d = 0; d < dim; ++d) squares += static_cast<double>(query[d]) * query[d];
        const double exact = std::sqrt(static_cast<double>(dim) / squares) * (2.0 / 3.0);
        const float scale = static_cast<float>(exact);
        uint32_t bits;
        __builtin_memcpy(&bits, &scale, sizeof bits);
        bits &= ~((uint32_t{1} << 20) - 1);
        float few;
        __builtin_memcpy(&few, &bits, sizeof few);
        return few;
    }

    // Says how many points the tokens of each block lose, see lost_points in paris/naive.py.
    void make_drops(char *work) const {
        const bool sampled = paris_.samples != nullptr;
        const auto products = [&](int64_t g) {
            return at<float>(work, offsets_) + g * offset_stride_;
        };
        const auto unit = [&](int64_t g) {
            return similarity_scale(at<float>(work, rotated_) + g * paris_.dim, paris_.dim) *
                   paris_.worth;
        };
        float most = -kInf;
        for (int64_t g = 0; sampled && g < tables_; ++g) {
            float *samples = at<float>(work, samples_) + g * sample_stride_;
            *samples = least_log(samples);
            const float best = *std::max_element(products(g), products(g) + blocks_);
            const float level = (best - *samples) * unit(g);
            if (std::isfinite(level)) most = std::max(most, level);
        }
        for (int64_t g = 0; g < tables_; ++g) {
            const float *own = products(g);
            const float least = sampled ? at<float>(work, samples_)[g * sample_stride_]
                                        : *std::max_element(own, own + blocks_);
            const float best = sampled ? most : 0.0f, points = unit(g);
            for (int64_t i = 0; i < blocks_; ++i) {
                const float behind = best - (own[i] - least) * points;
                at<uint8_t>(work, drops_)[i * drop_stride_ + g] =
                    behind > 0.0f ? static_cast<uint8_t>(std::min(behind, 255.0f)) : 0;
            }
        }
    }

    // See least_logs in paris/naive.py. The products with samples are overwritten.
    float least_log(float *products) const {
        const int64_t count = paris_.sample_count;
        const float scale = static_cast<float>(step_.attention.scale);
        const float peak = *std::max_element(products, products + count);
        for (int64_t i = 0; i < count; ++i) products[i] = (products[i] - peak) * scale;
        kernel_.exp(products, products, count);
        const float others = std::accumulate(products, products + count, -1.0f);
        const float taken = std::log(std::max(others, std::exp(-10.0f)));
        // See log_of_share in paris/codes.py.
        const double whole = static_cast<double>(step_.tokens) / step_.attention.count;
        const double share = std::max(0.0, std::log(whole) - 2.0) -
                             std::log(static_cast<double>(std::max<int64_t>(1, count - 1)));
        return peak + (taken + static_cast<float>(share)) / scale;
    }

    void make_tables(int64_t head, char *work, int64_t first, int64_t last) const {
        if (paris_.tiers == 0) return make_similar_tables(work, first, last);
        constexpr int64_t kUnit = 1000000;
        const int32_t *counts = paris_.counts + head * row_bytes_ * 256;
        int64_t total = 0, limits[256];
        for (int64_t c = 0; c < 256; ++c) total += counts[c];
        for (int64_t t = 0; t < paris_.tiers; ++t) {
            limits[t] = (total * paris_.shares[t] + kUnit - 1) / kUnit;
        }
        std::sort(limits, limits + paris_.tiers);
        uint8_t *points = at<uint8_t>(work, points_);
        for (int64_t g = first; g < last; ++g) {
            const float *query = at<float>(work, rotated_) + g * paris_.dim;
            for (int64_t s = 0; s < row_bytes_; ++s) {
                kernel_.points(query + 8 * s, counts + s * 256, limits, paris_.tiers,
                               points + (g * row_bytes_ + s) * 256);
            }
        }
    }

    void make_similar_tables(char *work, int64_t first, int64_t last) const {
        uint8_t *points = at<uint8_t>(work, points_);
        for (int64_t g = first; g < last; ++g) {
            const float *query = at<float>(work, rotated_) + g * paris_.dim;
            const float scale = similarity_scale(query, paris_.dim);
            for (int64_t s = 0; s < row_bytes_; ++s) {
                kernel_.similar_points(query + 8 * s, scale, points + (g * row_bytes_ + s) * 256);
            }
        }
    }

    void rerank(const Selection &selection, char *work, int64_t first, int64_t last) const {
        Rerank estimates;
        const uint8_t *record = paris_.record + selection.batch * paris_.record_batch +
                                selection.head * paris_.record_head;
        estimates.codes = {sign(selection), record, 4 * row_bytes_, paris_.dim};
        estimates.queries = at<float>(work, rotated_);
        estimates.heads = tables_;
        estimates.ids = at<int32_t>(work, candidates_);
        estimates.first = first, estimates.last = last;
        estimates.levels = paris_.levels;
        estimates.offsets = at<float>(work, offsets_), estimates.offset_stride = offset_stride_;
        estimates.block_bits = __builtin_ctzll(paris_.block_len);
        estimates.scale = static_cast<float>(step_.attention.scale);
        estimates.softcap = static_cast<float>(step_.attention.softcap);
        estimates.out = at<float>(work, estimates_);
        estimates.stride = stride_;
        kernel_.rerank(estimates);
    }

    const hfk_step &step_;
    const hfk_paris &paris_;
    const Kernel &kernel_;
    const int64_t heads_, tables_, row_bytes_, stride_, blocks_, offset_stride_, sample_stride_,
        drop_stride_;
    int64_t rotated_, offsets_, samples_, drops_, points_, packed_, scores_, count_, candidates_,
        estimates_, relevance_, bytes_;
};

bool is_good(const hfk_paris &paris, const hfk_request &request) {
    return paris.dim >= 8 && paris.dim <= kMostDim && paris.dim % 8 == 0 &&
           paris.dim >= request.key_dim && paris.tiers >= 0 &&
           (paris.tiers == 0 ? kMostSimilar : paris.tiers) * (paris.dim / 8) < 255 &&
           paris.candidates >= 0 && paris.block_len >= 64 &&
           paris.sample_count >= (paris.samples == nullptr ? 0 : 1) &&
           (paris.samples == nullptr || request.scale > 0) &&
           (paris.block_len & (paris.block_len - 1)) == 0;
}

} // namespace

std::unique_ptr<Search> make_paris_search(const hfk_step &step, const Kernel &kernel) {
    const hfk_paris &paris = *static_cast<const hfk_paris *>(step.search);
    if (!is_good(paris, step.attention)) return nullptr;
    return std::make_unique<ParisSearch>(step, paris, kernel);
}

void trace_paris(const Search &search, const Selection &selection, const char *work,
                 const hfk_paris_trace &trace) {
    static_cast<const ParisSearch &>(search).trace(selection, work, trace);
}
