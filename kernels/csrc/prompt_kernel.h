// Attention of many queries over rows that lie side by side. See rows.h on linkage.
#pragma once

#include "attend_kernel.h"

namespace {

template <class I, class T> class PromptWork {
  public:
    static void run(const PromptTile &tile) {
        PromptWork work(tile);
        if (tile.request->block_len == 0) return work.attend();
        work.sum_blocks();
    }

  private:
    // Rows are those of the first head, then of the next one.
    explicit PromptWork(const PromptTile &tile)
        : tile_(tile), request_(*tile.request), queries_(tile.last - tile.first),
          shape_(shape_of_prompt(request_, queries_)), space_(shape_, tile.scratch),
          products_(shape_, space_, [this](int64_t row) {
              return static_cast<const T *>(request_.query) + tile_.batch * request_.query_batch +
                     head_of(row) * request_.query_head + query_of(row) * request_.query_row;
          }) {
        clear(space_);
    }

    void attend() {
        // The last query sees the first `end` keys.
        const int64_t seen = request_.causal ? request_.causal_offset + tile_.last : request_.tokens;
        DenseStream rows = stream(std::min(request_.tokens, seen), valid());
        absorb<I>(shape_, space_, rows, products_,
                  [this](const Block &block, int64_t row, float *scores) {
                      hide(block, row, scores);
                  });
        for (int64_t row = 0; row < space_.heads; ++row) {
            const int64_t place = place_of(row);
            finish<I, false>(space_, row, request_.value_dim,
                             request_.out + place * request_.value_dim, request_.lse + place);
        }
    }

    // The log-sum-exp of each block's scores. The values of the rows are not read.
    void sum_blocks() {
        const int64_t length = request_.block_len, step = std::min<int64_t>(length, kBlock);
        const int64_t blocks = (request_.tokens + length - 1) / length;
        DenseStream rows = stream(request_.tokens, nullptr);
        const auto sum = [&](const Block &block, int64_t row, float *scores) {
            hide(block, row, scores);
            hide_holes(block, scores);
            float *largest = space_.largest + row, *sums = space_.weight_sums + row * kPad;
            float *to = request_.block_lse + place_of(row) * blocks;
            for (int64_t r = 0; r < block.count; r += step) {
                const int64_t token = block.places[r], last = std::min(r + step, int64_t{block.count});
                if (token % length == 0) {
                    *largest = -__builtin_inff();
                    std::fill_n(sums, kPad, 0.0f);
                }
                weigh<I>(scores + r, static_cast<int>(last - r), largest, sums, space_.rescale + row);
                if ((token + step) % length != 0 && token + step < request_.tokens) continue;
                to[token / length] = log_sum_of_weights<I>(space_, row);
            }
        };
        for_blocks<I>(shape_, space_, rows, products_, sum, [](const Block &) {});
    }

    DenseStream stream(int64_t end, const uint8_t *valid) const {
        const auto bytes = static_cast<int64_t>(sizeof(T));
        const int64_t key = tile_.batch * request_.key_batch + tile_.kv_head * request_.key_head;
        const int64_t value = tile_.batch * request_.value_batch + tile_.kv_head * request_.value_head;
        return DenseStream(static_cast<const char *>(request_.keys) + key * bytes,
                           request_.key_row * bytes,
                           static_cast<const char *>(request_.values) + value * bytes,
                           request_.value_row * bytes, end, valid);
    }

    const uint8_t *valid() const {
        if (request_.valid == nullptr) return nullptr;
        return request_.valid + tile_.batch * request_.valid_stride;
    }

    int64_t head_of(int64_t row) const {
        return tile_.kv_head * (request_.query_heads / request_.kv_heads) + row / queries_;
    }

    int64_t query_of(int64_t row) const { return tile_.first + row % queries_; }

    int64_t place_of(int64_t row) const {
        const int64_t head = tile_.batch * request_.query_heads + head_of(row);
        return head * request_.queries + query_of(row);
    }

    // Tokens that the row's query does not see have the score -inf.
    void hide(const Block &block, int64_t row, float *scores) const {
        const int64_t newest = block.places[block.count - 1];
        int64_t last = newest;
        if (request_.positions != nullptr) {
            last = request_.positions[tile_.batch * request_.queries + query_of(row)];
        } else if (request_.causal && newest > request_.causal_offset + tile_.first) {
            last = request_.causal_offset + query_of(row);
        }
        for (int r = block.count - 1; r >= 0 && block.places[r] > last; --r) {
            scores[r] = -__builtin_inff();
        }
    }

    void hide_holes(const Block &block, float *scores) const {
        const uint8_t *seen = valid();
        for (int r = 0; seen != nullptr && r < block.count; ++r) {
            if (!seen[block.places[r]]) scores[r] = -__builtin_inff();
        }
    }

    const PromptTile &tile_;
    const hfk_prompt &request_;
    const int64_t queries_;
    const hfk_request shape_;
    Workspace space_;
    ManyHeads<I, T> products_;
};

template <class I> void prompt_any(const PromptTile &tile) {
    auto *run = tile.request->dtype == HFK_BFLOAT16  ? PromptWork<I, Bf16>::run
                : tile.request->dtype == HFK_FLOAT16 ? PromptWork<I, Half>::run
                                                     : PromptWork<I, float>::run;
    run(tile);
}

} // namespace
