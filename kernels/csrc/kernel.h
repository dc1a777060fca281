// The functions that a translation unit for one instruction set gives to the dispatcher.
#pragma once

#include "hf_kvret_host.h"

// One selection, or a chunk of it: `ids` of a batch row, head and query, from `first` up to `last`,
// and the window's rows from `near_first` up to `near_last`, as far as the query sees them.
struct Span {
    int64_t batch;
    int64_t id_head;
    int64_t query;
    const int32_t *ids; // where they are read, all those of the selection
    int64_t first;
    int64_t last;
    int64_t near_first;
    int64_t near_last;
};

// The codes of one batch row's head, as hfk_paris has them.
struct ParisCodes {
    const uint8_t *sign;
    const uint8_t *record;
    int64_t width; // of a record, dim / 2
    int64_t dim;

    // A key's magnitudes, and codes of its weights.
    const uint8_t *magnitude(int64_t id) const { return record + id * width; }
    const uint8_t *weight(int64_t id) const { return magnitude(id) + 3 * dim / 8; }
};

// Points by similarity stay below 8, so that two heads share a byte.
constexpr int kMostSimilar = 7;
// Points of a similarity of 0.
constexpr int kZeroPoints = 3;

// Points of sign bytes, for a scan: those of `heads` heads, of `bytes` bytes each.
struct PointTables {
    int64_t heads;
    int64_t bytes;
    int64_t most;          // the largest entry
    const uint8_t *points; // [heads, bytes, 256]
    const uint8_t *drops;  // [heads, rounded up to a multiple of 8]: taken off sums, down to 0
    char *packed;          // packed_bytes(): as the kernel wants them
};

// Candidates whose scores are estimated.
struct Rerank {
    ParisCodes codes;
    const float *queries; // [heads, dim], rotated
    int64_t heads;
    const int32_t *ids;
    int64_t first, last;  // places of `ids` that are worked on
    const float *levels;  // [8]
    const float *offsets; // [heads, offset_stride], added to inner products: those of blocks of
    int64_t offset_stride, block_bits; // 2^block_bits tokens
    float scale, softcap;
    float *out;           // [heads, stride]
    int64_t stride;
};

// Scores of rows at equal distances by queries in fp32.
struct ProxyScores {
    const float *queries[64];    // of each head, [rank]
    float offsets[64];           // of each head, added to the products
    int64_t heads;               // at most 64
    const void *rows;            // from row 0 on
    int64_t row_bytes;           // from one row to the next
    int32_t dtype;
    int64_t rank;
    int64_t first, last;         // rows that are worked on
    const uint8_t *valid;        // a byte for each row; null: all are
    float softcap;               // 0 for none
    float *scratch;
    float *out;                  // [heads, stride]; -inf for rows that are not valid
    int64_t stride;
};

// Queries `first .. last` of the heads that share a KV head.
struct PromptTile {
    const hfk_prompt *request;
    int64_t batch;
    int64_t kv_head;
    int64_t first;
    int64_t last;
    float *scratch; // scratch_floats() of shape_of_prompt()
};

// A request of one head for each row of the tile's queries.
static inline hfk_request shape_of_prompt(const hfk_prompt &request, int64_t queries) {
    hfk_request shape{};
    shape.query_heads = queries * (request.query_heads / request.kv_heads), shape.id_heads = 1;
    shape.key_dim = request.key_dim, shape.value_dim = request.value_dim;
    shape.scale = request.scale, shape.softcap = request.softcap;
    return shape;
}

// Floats from one token of a product to the next, as kernels read them.
static inline int64_t product_stride(const hfk_product &work) { return (work.depth + 15) / 16 * 16; }

struct Kernel {
    // Floats that attend, score and dense_scores need to work in, for a request of any dtype.
    int64_t (*scratch_floats)(const hfk_request &request);

    // Attention of the query heads that share the span's ids, over the window, where it is not null,
    // and the span. Head g's result goes to out + g * out_stride and lse + g * lse_stride. False
    // where an id leads to no row.
    bool (*attend)(const hfk_request &request, const hfk_window *window, const Span &span,
                   float *scratch, float *out, int64_t out_stride, float *lse, int64_t lse_stride);

    // Scores of the span's ids; head g's go to out + g * out_stride, at their places in the ids.
    // False where an id leads to no row.
    bool (*score)(const hfk_request &request, const Span &span, float *scratch, float *out,
                  int64_t out_stride);

    // Scores of the keys `first .. last` of the span, which lie side by side from `keys` on; -inf
    // where `valid` is 0. Head g's go to out + g * out_stride + row.
    void (*dense_scores)(const hfk_request &request, const Span &span, const void *keys,
                         const uint8_t *valid, float *scratch, float *out, int64_t out_stride);

    // As dense_scores, for proxies. Scratch is that of a request of as many heads to an id head.
    void (*proxy_scores)(const ProxyScores &work);

    void (*exp)(const float *in, float *out, int64_t count);

    // Points of the 256 values of a sign byte, of eight coordinates. `limits` are the tiers' numbers
    // of keys, which rise.
    void (*points)(const float *query, const int32_t *counts, const int64_t *limits, int64_t tiers,
                   uint8_t *points);

    // The same by similarity: `scale` points for 1.
    void (*similar_points)(const float *query, float scale, uint8_t *points);

    int64_t (*packed_bytes)(const PointTables &tables);
    void (*pack)(const PointTables &tables);

    // Tokens `first .. last` score 1 + the largest of the heads' sums less drops, or 0 as `valid` has.
    // `first` is a multiple of 64, and scores may be written up to the next one behind `last`.
    void (*scan)(const PointTables &tables, const uint8_t *sign, const uint8_t *valid,
                 int64_t first, int64_t last, uint8_t *scores);

    // The places of the `count` highest of n scores, ascending; of equal ones the first, of zeros
    // none. Returns how many there are. Both arrays go on for 64 elements, scores with zeros.
    int64_t (*candidates)(const uint8_t *scores, int64_t n, int64_t count, int32_t *ids);

    void (*rerank)(const Rerank &work);

    // The largest of the log-softmaxes of the heads: scores [heads, stride] to relevance [n], which
    // goes on for 16 elements. With one head its scores do as well.
    void (*relevance)(const float *scores, int64_t heads, int64_t stride, int64_t n,
                      float *relevance);

    // The ids of the k most relevant of n, in their order, then -1; of equal ones the first, of -inf
    // and NaN none. `ids` null: the places themselves. `relevance` goes on for 16 elements.
    void (*best)(float *relevance, int64_t n, const int32_t *ids, int64_t k, int32_t *out);

    void (*prompt)(const PromptTile &tile);

    // Rows `first .. last` of the work.
    void (*encode)(const hfk_codes &work, int64_t first, int64_t last);
    void (*decode)(const hfk_codes &work, int64_t first, int64_t last);

    // Outputs `first .. last` of a product, for all tokens; `x` has product_stride() floats for each.
    void (*product)(const hfk_product &work, int64_t first, int64_t last, float *x);
};

// The code of `path`; null where it was not compiled or the processor lacks its instructions.
const Kernel *find_kernel(int32_t path);

extern const Kernel portable_kernel;
#ifdef HFK_X86
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;
#ifdef HFK_X86_BF16
extern const Kernel avx512_bf16_kernel;
#endif
#endif
#ifdef HFK_AARCH64
extern const Kernel neon_kernel;
#endif
