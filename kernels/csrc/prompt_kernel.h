// Attention of many queries over rows that lie side by side. See rows.h on linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"
#include "panels.h"

namespace {

// So many keys are scored at once.
constexpr int64_t kKeys = 128;

template <class I, class M = float, int kVectors = 3> class PromptWork {
    typedef typename I::V V;
    typedef Panel<I, M, kVectors> P;
    static constexpr int64_t kInSlot = P::kInSlot;
    static constexpr int kRows = P::kRows;
    static constexpr int64_t kPanel = P::kQueries;
    static constexpr float kInf = std::numeric_limits<float>::infinity();

  public:
    static int64_t floats(const hfk_prompt &request, int64_t queries) {
        const int64_t rows = padded(queries * heads_of(request), kPanel);
        const int64_t key_slots = slots(request.key_dim);
        const int64_t value_dim = padded(request.value_dim, kRows);
        return rows * (key_slots + value_dim + 2) + kKeys * kPanel + kKeys * apart(key_slots) +
               slots(kKeys) * apart(value_dim) + kPanel +
               std::max(padded(key_slots, I::lanes), padded(value_dim, I::lanes));
    }

    static void attend(const PromptTile &tile) {
        // A single vector of queries has panels of its own.
        const int64_t rows = (tile.last - tile.first) * heads_of(*tile.request);
        if constexpr (kVectors > 1) {
            if (rows <= I::lanes) return PromptWork<I, M, 1>::attend(tile);
        }
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
          queries_(tile.last - tile.first), rows_(padded(heads_ * queries_, kPanel)),
          key_slots_(slots(request_.key_dim)), value_dim_(padded(request_.value_dim, kRows)),
          key_row_(apart(key_slots_)), value_row_(apart(value_dim_)), query_(tile.scratch),
          out_(query_ + rows_ * key_slots_), top_(out_ + rows_ * value_dim_), sum_(top_ + rows_),
          scores_(sum_ + rows_), keys_(scores_ + kKeys * kPanel),
          values_(keys_ + kKeys * key_row_), seen_(values_ + slots(kKeys) * value_row_),
          line_(seen_ + kPanel) {}

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
            if (!read_keys(start, count)) continue;
            read_values(start);
            for (int64_t row = 0; row < rows_; row += kPanel) {
                score(row, start, count);
                P::update_softmax(scores_, kKeys, top_ + row, sum_ + row, out_ + row * value_dim_,
                                  value_dim_);
                if constexpr (kInSlot != 1) P::pair_weights(scores_, kKeys);
                P::template multiply<false>(values_, value_row_, scores_, slots(kKeys), out_ + row * value_dim_,
                                value_dim_);
            }
        }
        for (int64_t row = 0; row < heads_ * queries_; ++row) finish(row);
    }

    // The log-sum-exp of each block's scores. The values of the rows are not read.
    void sum_blocks() {
        read_queries();
        for (int64_t start = 0; start < request_.tokens; start += kKeys) {
            const int64_t count = std::min(kKeys, request_.tokens - start);
            const bool any = read_keys(start, count);
            for (int64_t row = 0; row < rows_; row += kPanel) {
                if (any) score(row, start, count);
                for (int64_t first = 0; first < count; first += request_.block_len) {
                    if (any) sum_block(first);
                    put_block(row, (start + first) / request_.block_len, any);
                }
            }
        }
    }

    // Writes the largest score of each query of the panel to `top_`, and the sum of weights to `sum_`.
    void sum_block(int64_t first) {
        for (int64_t c = 0; c < kPanel; c += I::lanes) {
            float *scores = scores_ + first * kPanel + c;
            const V top = P::largest(scores, request_.block_len, I::set1(-kInf));
            I::store(top_ + c, top);
            I::store(sum_ + c, P::to_weights(scores, request_.block_len, P::base_of(top)));
        }
    }

    void put_block(int64_t row, int64_t block, bool any) const {
        const int64_t blocks = (request_.tokens + request_.block_len - 1) / request_.block_len;
        const int64_t last = std::min(row + kPanel, heads_ * queries_);
        for (int64_t r = row; r < last; ++r) {
            const float sum = any ? sum_[r - row] : 0.0f;
            request_.block_lse[place_of(r) * blocks + block] =
                sum == 0.0f ? -kInf : top_[r - row] + std::log(sum);
        }
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

    // From one row to the next, so that rows of 2^n slots don't meet in few sets of the cache.
    static int64_t apart(int64_t row_slots) { return padded(row_slots, 16) + 16; }

    static int64_t slots(int64_t numbers) { return (numbers + kInSlot - 1) / kInSlot; }

    void put_row(const void *from, int64_t first, int64_t count, float *to) const {
        if (request_.dtype == HFK_BFLOAT16) {
            P::put_row(static_cast<const Bf16 *>(from) + first, count, to);
        } else if constexpr (kInSlot == 1) {
            const auto *halves = static_cast<const Half *>(from) + first;
            if (request_.dtype == HFK_FLOAT16) return P::put_row(halves, count, to);
            P::put_row(static_cast<const float *>(from) + first, count, to);
        }
    }

    // Reads the queries head by head, into panels [slots, kPanel]. What fills up the last panel is
    // zeros.
    void read_queries() {
        std::fill(query_, query_ + rows_ * key_slots_, 0.0f);
        for (int64_t row = 0; row < heads_ * queries_; ++row) {
            const int64_t head = tile_.kv_head * heads_ + row / queries_;
            const int64_t query = tile_.first + row % queries_;
            put_row(request_.query,
                     tile_.batch * request_.query_batch + head * request_.query_head +
                         query * request_.query_row,
                     request_.key_dim, line_);
            float *column = query_ + row / kPanel * kPanel * key_slots_ + row % kPanel;
            for (int64_t d = 0; d < key_slots_; ++d) column[d * kPanel] = line_[d];
        }
    }

    bool is_valid(int64_t token) const {
        return request_.valid == nullptr ||
               request_.valid[tile_.batch * request_.valid_stride + token] != 0;
    }

    // Tokens that are not valid are read as zeros. False where none is valid.
    bool read_keys(int64_t start, int64_t count) {
        all_valid_ = true;
        bool any = false;
        for (int64_t j = 0; j < kKeys; ++j) {
            valid_[j] = j < count && is_valid(start + j);
            all_valid_ &= valid_[j] || j >= count;
            any |= valid_[j];
        }
        if (!any) return false;
        const int64_t head = tile_.batch * request_.key_batch + tile_.kv_head * request_.key_head;
        for (int64_t j = 0; j < kKeys; ++j) {
            float *to = keys_ + j * key_row_;
            if (valid_[j]) {
                put_row(request_.keys, head + (start + j) * request_.key_row, request_.key_dim, to);
            } else {
                std::fill(to, to + key_slots_, 0.0f);
            }
        }
        return true;
    }

    // Neighbours of a slot are the values of two tokens.
    void read_values(int64_t start) {
        const int64_t head = tile_.batch * request_.value_batch + tile_.kv_head * request_.value_head;
        std::fill(values_, values_ + slots(kKeys) * value_row_, 0.0f);
        for (int64_t j = 0; j < kKeys; ++j) {
            if (!valid_[j]) continue;
            const int64_t first = head + (start + j) * request_.value_row;
            float *to = values_ + j / kInSlot * value_row_;
            if constexpr (kInSlot == 1) {
                put_row(request_.values, first, request_.value_dim, to);
            } else {
                P::put_halves(static_cast<const M *>(request_.values) + first, request_.value_dim,
                              to, j % kInSlot);
            }
        }
    }

    // Scores of the panel's queries: scaled, capped, and -inf for tokens that a query does not see.
    void score(int64_t row, int64_t start, int64_t count) {
        P::template multiply<true>(keys_, key_row_, query_ + row * key_slots_, key_slots_, scores_, kKeys);
        const V scale = I::set1(static_cast<float>(request_.scale));
        for (int64_t i = 0; i < kKeys * kPanel; i += I::lanes) {
            I::store(scores_ + i, I::load(scores_ + i) * scale);
        }
        if (request_.softcap != 0.0) {
            const V cap = I::set1(static_cast<float>(request_.softcap));
            for (int64_t i = 0; i < kKeys * kPanel; i += I::lanes) {
                I::store(scores_ + i, cap * tanh<I>(I::load(scores_ + i) / cap));
            }
        }
        const bool later = request_.causal && request_.causal_offset + tile_.first + 1 < start + kKeys;
        if (all_valid_ && count == kKeys && !later && request_.positions == nullptr) return;
        for (int64_t c = 0; c < kPanel; ++c) {
            seen_[c] = static_cast<float>(seen_by(row + c, start, count));
        }
        mask();
    }

    // How many of the `count` keys from `start` on a query sees, holes among them.
    int64_t seen_by(int64_t row, int64_t start, int64_t count) const {
        const int64_t query = tile_.first + row % queries_;
        if (row >= heads_ * queries_) return count;
        if (request_.positions != nullptr) {
            const int64_t last = request_.positions[tile_.batch * request_.queries + query];
            const int64_t seen = std::clamp<int64_t>(last, -1, request_.tokens - 1) + 1;
            return std::clamp<int64_t>(seen - start, 0, count);
        }
        if (!request_.causal) return count;
        return std::clamp<int64_t>(request_.causal_offset + query - start + 1, 0, count);
    }

    void mask() {
        const V none = I::set1(-kInf);
        for (int64_t j = 0; j < kKeys; ++j) {
            const V key = I::set1(static_cast<float>(j));
            for (int64_t c = 0; c < kPanel; c += I::lanes) {
                float *scores = scores_ + j * kPanel + c;
                const V masked = I::where_less(key, I::load(seen_ + c), I::load(scores), none);
                I::store(scores, valid_[j] ? masked : none);
            }
        }
    }

    void finish(int64_t row) const {
        const int64_t place = place_of(row);
        const float inverse = sum_[row] == 0.0f ? 0.0f : 1.0f / sum_[row];
        const float *out = out_ + row / kPanel * kPanel * value_dim_ + row % kPanel;
        float *to = request_.out + place * request_.value_dim;
        for (int64_t d = 0; d < request_.value_dim; ++d) to[d] = out[d * kPanel] * inverse;
        request_.lse[place] = sum_[row] == 0.0f ? -kInf : top_[row] + std::log(sum_[row]);
    }

    const PromptTile &tile_;
    const hfk_prompt &request_;
    const int64_t heads_, queries_, rows_, key_slots_, value_dim_, key_row_, value_row_;
    float *const query_, *const out_, *const top_, *const sum_, *const scores_, *const keys_;
    float *const values_, *const seen_, *const line_;
    bool valid_[kKeys], all_valid_ = true;
};

} // namespace
