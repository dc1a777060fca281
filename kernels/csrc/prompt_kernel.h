// Attention of many queries over rows that lie side by side: products of blocks, with an online
// softmax between them. See rows.h on linkage.
//
// `M` is what products are of: fp32 numbers, or bf16 as it is given, where `I` multiplies it. Sums are
// fp32. A slot is four bytes of the work space: a number of fp32, or two neighbours in bf16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"
#include "rows.h"
#include "tiles.h"
#include "vector_math.h"

namespace {

// So many keys are packed and scored at once.
constexpr int64_t kKeys = 128;

template <class I, class M = float> class PromptWork {
    typedef typename I::V V;
    static constexpr int64_t kInSlot = sizeof(float) / sizeof(M);
    static constexpr int kRows = I::few_registers ? 6 : 12; // of queries, whose sums fill registers
    static constexpr int64_t kPanel = 2 * I::lanes;         // columns that are worked on together
    static constexpr float kInf = std::numeric_limits<float>::infinity();

  public:
    static int64_t floats(const hfk_prompt &request, int64_t queries) {
        const int64_t rows = padded(queries * heads_of(request), kRows);
        const int64_t value_dim = padded(request.value_dim, kPanel);
        const int64_t key_slots = slots(request.key_dim);
        const int64_t of_row = key_slots + value_dim + kKeys + 2;
        // Behind them lie the packed keys and values, and one row that is read.
        return rows * of_row + kKeys * key_slots + slots(kKeys) * value_dim +
               padded(std::max(request.key_dim, value_dim), kPanel);
    }

    static void attend(const PromptTile &tile) {
        PromptWork work(tile);
        if (tile.request->block_len == 0) {
            work.attend();
        } else {
            work.sum_blocks();
        }
    }

  private:
    explicit PromptWork(const PromptTile &tile)
        : tile_(tile), request_(*tile.request), heads_(heads_of(request_)),
          queries_(tile.last - tile.first), rows_(padded(heads_ * queries_, kRows)),
          key_slots_(slots(request_.key_dim)), value_dim_(padded(request_.value_dim, kPanel)),
          query_(tile.scratch), out_(query_ + rows_ * key_slots_),
          scores_(out_ + rows_ * value_dim_), keys_(scores_ + rows_ * kKeys),
          values_(keys_ + kKeys * key_slots_), top_(values_ + slots(kKeys) * value_dim_),
          sum_(top_ + rows_), line_(sum_ + rows_) {}

    void attend() {
        read_queries();
        std::fill(out_, out_ + rows_ * value_dim_, 0.0f);
        std::fill(top_, top_ + rows_, -kInf);
        std::fill(sum_, sum_ + rows_, 0.0f);
        // The last query sees the first `end` keys.
        const int64_t seen = request_.causal ? request_.causal_offset + tile_.last : request_.tokens;
        const int64_t end = std::min(request_.tokens, seen);
        for (int64_t start = 0; start < end; start += kKeys) {
            const int64_t count = std::min(kKeys, end - start);
            if (!pack(start, count)) continue;
            multiply<1, kRows>(query_, keys_, key_slots_, scores_, kKeys, kKeys, false);
            for (int64_t row = 0; row < heads_ * queries_; ++row) {
                update_softmax(row, start, count);
                round_weights(scores_ + row * kKeys);
            }
            multiply<kKeys, 1>(scores_, values_, slots(kKeys), out_, value_dim_, value_dim_, true);
        }
        for (int64_t row = 0; row < heads_ * queries_; ++row) finish(row);
    }

    // The log-sum-exp of each block's scores. The values of the rows are not read.
    void sum_blocks() {
        read_queries();
        const int64_t length = request_.block_len;
        for (int64_t start = 0; start < request_.tokens; start += kKeys) {
            const int64_t count = std::min(kKeys, request_.tokens - start);
            const bool any = pack(start, count);
            if (any) multiply<1, kRows>(query_, keys_, key_slots_, scores_, kKeys, kKeys, false);
            for (int64_t row = 0; row < heads_ * queries_; ++row) {
                float *scores = scores_ + row * kKeys;
                if (any) mask(row, start, count);
                float *to = request_.block_lse + place_of(row) * blocks() + start / length;
                for (int64_t first = 0; first < count; first += length) {
                    *to++ = any ? log_sum(scores + first, length) : -kInf;
                }
            }
        }
    }

    int64_t blocks() const { return (request_.tokens + request_.block_len - 1) / request_.block_len; }

    // The log-sum-exp; scores are overwritten.
    static float log_sum(float *scores, int64_t count) {
        const float top = largest(scores, count);
        const float sum = to_weights(scores, count, top);
        return sum == 0.0f ? -kInf : top + std::log(sum);
    }

    static float largest(const float *scores, int64_t count) {
        V top = I::load(scores);
        for (int64_t j = I::lanes; j < count; j += I::lanes) top = I::max(top, I::load(scores + j));
        return I::largest(top);
    }

    // Replaces scores by exp(score - top), and sums these. Without a key all are 0, but NaN stays.
    static float to_weights(float *scores, int64_t count, float top) {
        const V base = I::set1(top == -kInf ? 0.0f : top);
        V sum = I::set1(0.0f);
        for (int64_t j = 0; j < count; j += I::lanes) {
            const V weight = exp_of_nonpositive<I>(I::load(scores + j) - base);
            I::store(scores + j, weight);
            sum = sum + weight;
        }
        // Halves are added to each other: one by one, each addition would wait for the last.
        float parts[I::lanes];
        I::store(parts, sum);
        HFK_UNROLL for (int half = I::lanes / 2; half > 0; half /= 2) {
            HFK_UNROLL for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
        }
        return parts[0];
    }

    int64_t place_of(int64_t row) const {
        const int64_t head = tile_.kv_head * heads_ + row / queries_;
        return (tile_.batch * request_.query_heads + head) * request_.queries + tile_.first +
               row % queries_;
    }

    static int64_t heads_of(const hfk_prompt &request) {
        return request.query_heads / request.kv_heads;
    }

    static int64_t padded(int64_t number, int64_t multiple) {
        return (number + multiple - 1) / multiple * multiple;
    }

    static int64_t slots(int64_t numbers) { return (numbers + kInSlot - 1) / kInSlot; }

    // Converts `count` elements to fp32, with zeros behind them up to a whole vector.
    void to_float(const void *from, int64_t first, int64_t count, float *to) const {
        switch (request_.dtype) {
        case HFK_FLOAT32:
            return to_float(static_cast<const float *>(from) + first, count, to);
        case HFK_FLOAT16:
            return to_float(static_cast<const Half *>(from) + first, count, to);
        default:
            return to_float(static_cast<const Bf16 *>(from) + first, count, to);
        }
    }

    template <class T> static void to_float(const T *from, int64_t count, float *to) {
        int64_t i = 0;
        for (; i + I::lanes <= count; i += I::lanes) I::store(to + i, I::load(from + i));
        if (i < count) I::store(to + i, I::load_some(from + i, static_cast<int>(count - i)));
    }

    // A row as products read it, in whole slots.
    void to_slots(const void *from, int64_t first, int64_t count, float *to) const {
        if constexpr (kInSlot == 1) {
            to_float(from, first, count, to);
        } else {
            to[slots(count) - 1] = 0.0f; // an odd count leaves half a slot
            std::memcpy(to, static_cast<const M *>(from) + first, count * sizeof(M));
        }
    }

    // Reads the queries head by head, into strips [slots, kRows]. Rows that fill up the last are zeros.
    void read_queries() {
        std::fill(query_, query_ + rows_ * key_slots_, 0.0f);
        for (int64_t row = 0; row < heads_ * queries_; ++row) {
            const int64_t head = tile_.kv_head * heads_ + row / queries_;
            const int64_t query = tile_.first + row % queries_;
            to_slots(request_.query,
                  tile_.batch * request_.query_batch + head * request_.query_head +
                      query * request_.query_row,
                  request_.key_dim, line_);
            float *to = query_ + row / kRows * kRows * key_slots_ + row % kRows;
            for (int64_t d = 0; d < key_slots_; ++d) to[d * kRows] = line_[d];
        }
        std::fill(scores_ + heads_ * queries_ * kKeys, scores_ + rows_ * kKeys, 0.0f);
    }

    bool is_valid(int64_t token) const {
        return request_.valid == nullptr ||
               request_.valid[tile_.batch * request_.valid_stride + token] != 0;
    }

    // Packs keys and values into panels of columns. A column is a key, or an element of all values.
    // Tokens that are not valid are packed as zeros. False where none is valid.
    bool pack(int64_t start, int64_t count) {
        all_valid_ = true;
        bool any = false;
        for (int64_t j = 0; j < kKeys; ++j) {
            valid_[j] = j < count && is_valid(start + j);
            all_valid_ &= valid_[j] || j >= count;
            any |= valid_[j];
        }
        if (!any) return false;
        for (int64_t j = 0; j < kKeys; ++j) pack_key(start, j);
        if (request_.block_len != 0) return true;
        for (int64_t j = 0; j < kKeys; ++j) pack_value(start, j);
        return true;
    }

    void pack_key(int64_t start, int64_t j) {
        float *column = keys_ + j / kPanel * kPanel * key_slots_ + j % kPanel;
        if (!valid_[j]) {
            for (int64_t d = 0; d < key_slots_; ++d) column[d * kPanel] = 0.0f;
            return;
        }
        const int64_t head = tile_.batch * request_.key_batch + tile_.kv_head * request_.key_head;
        to_slots(request_.keys, head + (start + j) * request_.key_row, request_.key_dim, line_);
        for (int64_t d = 0; d < key_slots_; ++d) column[d * kPanel] = line_[d];
    }

    // Neighbours of a slot are the values of two tokens.
    void pack_value(int64_t start, int64_t j) {
        std::fill(line_, line_ + slots(value_dim_), 0.0f);
        if (valid_[j]) {
            const int64_t head =
                tile_.batch * request_.value_batch + tile_.kv_head * request_.value_head;
            to_slots(request_.values, head + (start + j) * request_.value_row, request_.value_dim,
                     line_);
        }
        const char *from = reinterpret_cast<const char *>(line_);
        for (int64_t panel = 0; panel < value_dim_; panel += kPanel) {
            float *row = values_ + panel * slots(kKeys) + j / kInSlot * kPanel;
            char *to = reinterpret_cast<char *>(row) + j % kInSlot * sizeof(M);
            for (int64_t d = 0; d < kPanel; ++d) {
                std::memcpy(to + d * sizeof *row, from + (panel + d) * sizeof(M), sizeof(M));
            }
        }
    }

    // Writes a b to c [rows, columns], or adds it; b lies in panels of columns. `Row` and `Step` are
    // the distances of a's rows, in a strip of them, and of its columns: known, so that a loop over
    // columns needs one address and not one for each row.
    template <int64_t Row, int64_t Step>
    void multiply(const float *a, const float *b, int64_t depth, float *c, int64_t c_row,
                  int64_t columns, bool adds) const {
        const int64_t a_row = Step == 1 ? Row : depth;
        for (int64_t column = 0; column < columns; column += kPanel) {
            for (int64_t row = 0; row < rows_; row += kRows) {
                multiply_panel<Row, Step>(a + row * a_row, b + column * depth, depth,
                                          c + row * c_row + column, c_row, adds);
            }
        }
    }

    template <int64_t Row, int64_t Step>
    static void multiply_panel(const float *a, const float *b, int64_t depth, float *c,
                               int64_t c_row, bool adds) {
        V sums[kRows][2];
        HFK_UNROLL for (int r = 0; r < kRows; ++r) {
            sums[r][0] = adds ? I::load(c + r * c_row) : I::set1(0.0f);
            sums[r][1] = adds ? I::load(c + r * c_row + I::lanes) : I::set1(0.0f);
        }
        for (int64_t k = 0; k < depth; ++k, a += Step, b += kPanel) {
            const V left = I::load(b), right = I::load(b + I::lanes);
            HFK_UNROLL for (int r = 0; r < kRows; ++r) {
                const V factor = I::set1(a[r * Row]);
                sums[r][0] = multiply_add(factor, left, sums[r][0]);
                sums[r][1] = multiply_add(factor, right, sums[r][1]);
            }
        }
        HFK_UNROLL for (int r = 0; r < kRows; ++r) {
            I::store(c + r * c_row, sums[r][0]);
            I::store(c + r * c_row + I::lanes, sums[r][1]);
        }
    }

    static V multiply_add(V a, V b, V sum) {
        if constexpr (kInSlot == 1) {
            return I::fma(a, b, sum);
        } else {
            return I::multiply_add(I::as_pair(a), I::as_pair(b), sum);
        }
    }

    // Scales and caps the scores of a row, and writes -inf for tokens that its query does not see.
    void mask(int64_t row, int64_t start, int64_t count) {
        float *scores = scores_ + row * kKeys;
        const V scale = I::set1(static_cast<float>(request_.scale));
        for (int64_t j = 0; j < kKeys; j += I::lanes) {
            I::store(scores + j, I::load(scores + j) * scale);
        }
        if (request_.softcap != 0.0) {
            const V cap = I::set1(static_cast<float>(request_.softcap));
            for (int64_t j = 0; j < kKeys; j += I::lanes) {
                I::store(scores + j, cap * tanh<I>(I::load(scores + j) / cap));
            }
        }
        const int64_t query = tile_.first + row % queries_;
        if (request_.positions != nullptr) {
            const int64_t last = request_.positions[tile_.batch * request_.queries + query];
            const int64_t seen = std::clamp<int64_t>(last, -1, request_.tokens - 1) + 1;
            count = std::clamp<int64_t>(seen - start, 0, count);
        } else if (request_.causal) {
            const int64_t last = request_.causal_offset + query - start;
            count = std::clamp<int64_t>(last + 1, 0, count);
        }
        if (count == kKeys && all_valid_) return;
        for (int64_t j = 0; j < kKeys; ++j) {
            if (j >= count || !valid_[j]) scores[j] = -kInf;
        }
    }

    // A step of the online softmax: turns scores of a row into weights under its new largest score,
    // and rescales what was summed so far.
    void update_softmax(int64_t row, int64_t start, int64_t count) {
        mask(row, start, count);
        float *scores = scores_ + row * kKeys;
        const float top = std::max(top_[row], largest(scores, kKeys));
        const float total = to_weights(scores, kKeys, top);
        if (top != top_[row]) {
            const float rescale = std::exp(top_[row] - top);
            const V factor = I::set1(rescale);
            float *out = out_ + row * value_dim_;
            for (int64_t d = 0; d < value_dim_; d += I::lanes) {
                I::store(out + d, I::load(out + d) * factor);
            }
            sum_[row] *= rescale;
            top_[row] = top;
        }
        sum_[row] += total;
    }

    // Rounds a row of weights to bf16, where that is multiplied. They fill its first half.
    static void round_weights(float *weights) {
        if constexpr (kInSlot != 1) {
            for (int64_t j = 0; j < kKeys; j += 2 * I::lanes) {
                const V low = I::load(weights + j), high = I::load(weights + j + I::lanes);
                I::store(weights + j / 2, I::rounded(low, high));
            }
        }
    }

    void finish(int64_t row) const {
        const int64_t place = place_of(row);
        const float inverse = sum_[row] == 0.0f ? 0.0f : 1.0f / sum_[row];
        const float *out = out_ + row * value_dim_;
        float *to = request_.out + place * request_.value_dim;
        for (int64_t d = 0; d < request_.value_dim; ++d) to[d] = out[d] * inverse;
        request_.lse[place] = sum_[row] == 0.0f ? -kInf : top_[row] + std::log(sum_[row]);
    }

    const PromptTile &tile_;
    const hfk_prompt &request_;
    const int64_t heads_, queries_, rows_, key_slots_, value_dim_;
    float *const query_, *const out_, *const scores_, *const keys_, *const values_;
    float *const top_, *const sum_, *const line_;
    bool valid_[kKeys], all_valid_ = true;
};

} // namespace
