// Attention to rows in codes: they are looked up and stay transformed, so that queries are transformed
// instead of keys, and sums instead of values. See rows.h on linkage.
#pragma once

#include "codes.h"

namespace {

// Whether a row in codes has a value beside its key.
inline bool has_value(const hfk_request &request) { return request.value_start > 0; }

inline int64_t scale_row_bytes(const hfk_request &request) {
    const int64_t numbers = request.key_dim + (has_value(request) ? request.value_dim : 0);
    return scale_bytes(*request.coding, numbers);
}

// A page's head holds the codes of all its rows, and then their scales.
inline RowLayout coded_layout(const hfk_request &request) {
    const int64_t codes = request.page_len * request.row_dim, scales = scale_row_bytes(request);
    return {request.row_dim, codes, scales, codes + request.page_len * scales};
}

// A block of rows in codes as numbers, in whole vectors.
inline int64_t coded_block_floats(const hfk_request &request) {
    return kBlock * (padded(request.key_dim) + padded(request.value_dim));
}

// Rows in codes as fp32 numbers, transformed, block by block.
template <class I> class CodedStream {
  public:
    // `room`: of coded_block_floats(). Without `values` it is keys alone.
    CodedStream(const hfk_request &request, const Span &span, float *room, bool values)
        : request_(request), looks_up_values_(values && has_value(request)),
          read_bytes_(looks_up_values_ ? request.row_dim : code_bytes(*request.coding, request.key_dim)),
          rows_(request, span, coded_layout(request), read_bytes_), room_(room) {}

    bool is_whole() const { return rows_.is_whole(); }

    void take(Block &block) {
        rows_.take(block);
        const hfk_coding &coding = *request_.coding;
        const int64_t key_stride = padded(request_.key_dim);
        const int64_t value_stride = padded(request_.value_dim);
        const int64_t key_scales = scale_bytes(coding, request_.key_dim);
        for (int i = 0; i < block.count; ++i) {
            for (int64_t byte = kLine; byte < read_bytes_; byte += kLine) {
                ask_for(block.keys_ahead[i] + byte);
            }
            ask_for(block.values_ahead[i]);
            const uint8_t *codes = reinterpret_cast<const uint8_t *>(block.keys[i]);
            const uint8_t *scales = reinterpret_cast<const uint8_t *>(block.values[i]);
            float *key = room_ + i * key_stride;
            float *value = key;
            transformed_row<I>(coding, codes, scales, request_.key_dim, key);
            if (looks_up_values_) {
                value = room_ + kBlock * key_stride + i * value_stride;
                transformed_row<I>(coding, codes + request_.value_start, scales + key_scales,
                                   request_.value_dim, value);
            }
            // They are in the cache.
            block.keys[i] = block.keys_ahead[i] = reinterpret_cast<const char *>(key);
            block.values[i] = block.values_ahead[i] = reinterpret_cast<const char *>(value);
        }
    }

  private:
    const hfk_request &request_;
    const bool looks_up_values_;
    const int64_t read_bytes_;
    RowStream rows_;
    float *const room_;
};

} // namespace
