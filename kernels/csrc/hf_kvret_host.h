// C interface of the CPU library: attention over chosen rows in host memory, and whole decode steps.
//
// A row is a key followed by its value, or a key in which its value lies. Rows lie in pages
// [kv_heads, page_len, row_dim], a page is found by its address, and `table` maps the tokens of a
// batch row to page numbers.
//
// No id is trusted: it is -1 for none, or the number of a token. Nothing is read for any other id, nor
// for one whose table entry names no page, nor for a code of no codeword: the request fails.
#pragma once

#include <stdint.h>

#define HFK_API extern "C" __attribute__((visibility("default")))

// Raised with every change of hfk_request or of a function's meaning; the caller compares.
#define HFK_VERSION 24

// HFK_INT8 is for the rows of hfk_proxy alone.
enum hfk_dtype { HFK_FLOAT32 = 0, HFK_FLOAT16 = 1, HFK_BFLOAT16 = 2, HFK_INT8 = 3 };

// Implementations; each gives the same results up to rounding.
enum hfk_path {
    HFK_AUTO = -1, HFK_PORTABLE = 0, HFK_AVX2 = 1, HFK_AVX512 = 2, HFK_AVX512_BF16 = 3, HFK_NEON = 4
};

enum hfk_status {
    HFK_OK = 0,
    HFK_NO_MEMORY = 1,
    HFK_NO_PATH = 2,     // the path is unknown, was not compiled, or the processor lacks it
    HFK_BAD_REQUEST = 3, // an unknown dtype, or sizes that do not divide as they must
    HFK_BAD_ID = 4       // an id that leads to no row, or a code to no codeword; `out` and `lse` may
                         // hold anything
};

// The search that chooses the ids of a step, and the struct that describes it.
enum hfk_search {
    HFK_SEARCH_NONE = 0,     // the ids are given
    HFK_SEARCH_FLAT = 1,     // hfk_flat
    HFK_SEARCH_PARIS = 2,    // hfk_paris
    HFK_SEARCH_PROXY = 3,    // hfk_proxy
    HFK_SEARCH_CODEBOOK = 4, // hfk_codebook
    HFK_SEARCH_LISTS = 5,    // hfk_lists
};

// How rows of numbers are coded: HIGGS, see higgs/naive.py. Groups of numbers are multiplied by signs
// and transformed; pairs over the group's scale, an fp16 number, are rounded to points of a grid.
struct hfk_coding {
    const float *grid;      // [4^bits, 2]
    const float *signs;     // [group]: 1 or -1
    const float *key_mean;  // [batch, kv_heads, key_dim], of a request: what was taken off its keys;
                            // null: nothing was
    int64_t group;          // a power of two from 8 to 1,024
    int32_t bits;           // of a number: 2, 3 or 4
    int32_t reserved;
};

// All arrays are contiguous; sizes count elements.
struct hfk_request {
    const void *query;      // [batch, query_heads, queries, key_dim], of `dtype`
    const int32_t *ids;     // [batch, id_heads, queries, count]: below `tokens`; -1 is a hole
    const int32_t *table;   // [batch, max_pages]: page numbers
    const int64_t *pages;   // byte address of every page
    float *out;             // attend: [batch, query_heads, queries, value_dim]
                            // scores: [batch, query_heads, queries, count]
    float *lse;             // attend: [batch, query_heads, queries], natural log; scores: unused
    const struct hfk_coding *coding; // of rows in codes; null: rows are numbers
    int64_t batch;
    int64_t query_heads;    // a multiple of id_heads
    int64_t id_heads;       // kv_heads or a multiple of it
    int64_t kv_heads;
    int64_t queries;
    int64_t count;
    int64_t key_dim;
    int64_t value_dim;
    int64_t max_pages;
    int64_t page_len;
    int64_t page_count;     // of `pages`
    int64_t tokens;         // that have rows, at most max_pages * page_len
    int64_t row_dim;        // at least key_dim; of rows in codes: bytes of the codes, behind which
                            // lie, for all rows of a page's head, their scales
    int64_t value_start;    // where in a row its value begins; value_start + value_dim <= row_dim; of
                            // rows in codes: the bytes of a key's codes, or 0: values are in keys
    double scale;           // factor of the dot products
    double softcap;         // c of c * tanh(scale * q.k / c); 0 for none
    int32_t dtype;          // of query and rows
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t in_files;       // whether rows lie in mapped files, and may have to be read from a disk
};

// Cells in each direction, and points of a cell, of hfk_near_points, and where its square ends.
#define HFK_CELLS 256
#define HFK_NEAR 4
#define HFK_REACH 4.0f

// Rows of numbers, and the same rows in codes.
struct hfk_codes {
    void *numbers;          // [rows, width], of `dtype`
    uint8_t *codes;         // [rows, width * bits / 8], `code_row` bytes from one row to the next
    uint8_t *scales;        // [rows, width / group] fp16, `scale_row` bytes from one row to the next
    const float *added;     // [rows / added_every, width]: is added to decoded numbers; null: nothing
    const float *merits;    // [4^bits, 4], to encode: x, y and half the square of each point, and 0
    const uint8_t *near;    // [HFK_CELLS, HFK_CELLS, HFK_NEAR], to encode, of hfk_near_points
    struct hfk_coding coding;
    int64_t rows;
    int64_t width;          // a multiple of the group
    int64_t code_row;
    int64_t scale_row;
    int64_t added_every;    // consecutive rows that one of `added` is for
    int32_t dtype;
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t reserved;
};

// A weight times few tokens, plus a bias. All arrays are contiguous and of `dtype`.
struct hfk_product {
    const void *x;          // [tokens, depth]
    const void *weight;     // [outputs, depth]
    const void *bias;       // [outputs]; null: none
    void *out;              // [tokens, outputs]
    int64_t tokens;
    int64_t outputs;
    int64_t depth;          // at least 1
    int32_t dtype;
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t reserved;
};

// Attention of many queries over rows that lie side by side; last dimensions are contiguous.
struct hfk_prompt {
    const void *query;      // [batch, query_heads, queries, key_dim]
    const void *keys;       // [batch, kv_heads, tokens, key_dim]
    const void *values;     // [batch, kv_heads, tokens, value_dim]
    const uint8_t *valid;   // [batch, tokens], 0 for rows that no query sees; null: all are seen
    const int64_t *positions; // [batch, queries]: the last token that a query sees; null: `causal`
    float *out;             // [batch, query_heads, queries, value_dim], contiguous
    float *lse;             // [batch, query_heads, queries], contiguous, natural log
    float *block_lse;       // log-sum-exp of each block of tokens, [batch, query_heads, queries, blocks],
                            // contiguous; written in place of `out` and `lse` where block_len is not 0
    int64_t block_len;      // tokens of a block: 16, 32, 64 or 128; 0: attention
    int64_t batch;
    int64_t query_heads;    // a multiple of kv_heads
    int64_t kv_heads;
    int64_t queries;
    int64_t tokens;
    int64_t key_dim;
    int64_t value_dim;
    int64_t query_batch;    // strides in elements
    int64_t query_head;
    int64_t query_row;
    int64_t key_batch;
    int64_t key_head;
    int64_t key_row;
    int64_t value_batch;
    int64_t value_head;
    int64_t value_row;
    int64_t valid_stride;   // elements from one batch row of `valid` to the next
    int64_t causal_offset;  // query i sees the first causal_offset + i + 1 tokens, where `causal`
    double scale;           // factor of the dot products
    double softcap;         // c of c * tanh(scale * q.k / c); 0 for none
    int32_t causal;
    int32_t dtype;          // of query, keys and values
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
};

// Keys and where ParisKV's codes of them go; last dimensions are contiguous, and so are the tokens of
// a head's codes.
struct hfk_paris_encoding {
    const void *keys;       // [batch, heads, tokens, head_dim]
    const float *signs;     // [dim]
    const float *levels;    // [8], ascending
    uint8_t *sign;          // [batch, heads, tokens, dim / 8]
    uint8_t *record;        // [batch, heads, tokens, dim / 2]: magnitudes, weights
    int64_t batch;
    int64_t heads;
    int64_t tokens;
    int64_t head_dim;
    int64_t dim;            // numbers of a rotated key, a multiple of 8 up to 1024
    int64_t stride;         // rotated coordinate i takes number i * stride % dim of a key
    int64_t key_batch;      // strides in elements
    int64_t key_head;
    int64_t key_row;
    int64_t sign_batch;
    int64_t sign_head;
    int64_t record_batch;
    int64_t record_head;
    int32_t dtype;          // of keys
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t reserved;
};

// Scores from which the best tokens are chosen; all arrays are contiguous.
struct hfk_ranking {
    const float *scores;    // [batch, query_heads, queries, count]
    const int32_t *ids;     // [batch, id_heads, queries, count]; negative is a hole
    int32_t *best;          // [batch, id_heads, queries, wanted]
    int64_t batch;
    int64_t query_heads;    // a multiple of id_heads
    int64_t id_heads;
    int64_t queries;
    int64_t count;
    int64_t wanted;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t path;
};

// Rows beside each other that all queries see: the window of a layer.
struct hfk_window {
    const void *keys;       // [batch, kv_heads, capacity, key_dim], of the request's dtype
    const void *values;     // [batch, kv_heads, capacity, value_row], the first value_dim of them
    const uint8_t *valid;   // [batch, length], 0 for rows that no query sees; null: none of them
    int64_t valid_stride;   // elements from one batch row of `valid` to the next
    int64_t capacity;
    int64_t length;         // rows held; of n queries the i-th sees all but the last n - 1 - i
    int64_t value_row;      // elements from one value to the next, at least value_dim
};

// These moments of all cold tokens stand for what the ids of a step leave out. The ids are taken for
// the largest. See layer/cold_sums.py for the meaning.
struct hfk_rest {
    const float *moments;   // [batch, kv_heads, 1 + key_dim + value_dim, key_dim]: the mean key, and
                            // the covariances of keys and of values with keys
    const float *values;    // [batch, kv_heads, value_dim]: the mean value
    const int64_t *counts;  // [batch]: of the tokens
};

// A decode step of a layer: a search for the cold tokens of each query, and attention over these
// and the window.
struct hfk_step {
    struct hfk_request attention; // `ids` is written by the search, where there is one
    struct hfk_window window;     // length 0: none
    const uint8_t *valid;         // [batch, tokens], 0 for cold tokens that are never chosen
    int64_t valid_stride;         // elements from one batch row of `valid` to the next
    int64_t tokens;               // cold tokens, all of which the search knows
    const void *search;           // the struct of `search_kind`
    const struct hfk_rest *rest;  // joins the softmax; or null
    const float *sink_logits;     // [query_heads]: a token without value joins the softmax; or null
    int64_t *selected;            // the number of ids that are no holes is added; or null
    void *result;                 // as attention.out, of the request's dtype, and in its place;
                                  // null where attention.out is to be written
    const void *new_key;          // [batch, kv_heads, key_dim]: of the window's newest token, which
                                  // the step writes there first; null where it is there already
    const void *new_value;        // [batch, kv_heads, value_dim]; null where keys hold the values
    int32_t search_kind;
    int32_t reserved;
};

// Exact scores of all keys, and the best of them.
struct hfk_flat {
    const void *keys;       // [batch, id_heads, *, key_dim], rows contiguous, of the step's dtype
    int64_t batch_stride;   // elements
    int64_t head_stride;
};

// ParisKV's two stages over codes of the keys: points for centroids near the query, then estimates
// of the scores of those with most points. See paris/naive.py for what each number means.
struct hfk_paris {
    const uint8_t *sign;      // [batch, id_heads, *, dim / 8], rows contiguous
    const uint8_t *record;    // [batch, id_heads, *, dim / 2]
    const int32_t *counts;    // [batch, id_heads, dim / 8, 256]
    const float *means;       // [batch, id_heads, blocks, key_dim]: what was subtracted from the
                              // keys of each block of tokens; null: nothing was
    const float *samples;     // [batch, id_heads, sample_count, key_dim]: keys that tell what the
                              // softmaxes of queries take off; null: queries count by themselves
    const float *signs;       // [batch, id_heads, dim], times factors of coordinates
    const float *levels;      // [8]
    const int64_t *shares;    // [tiers], in millionths of all keys
    int64_t sign_batch;       // strides in elements
    int64_t sign_head;
    int64_t record_batch;
    int64_t record_head;
    int64_t dim;              // P: a multiple of 8 up to 1,024, at least key_dim
    int64_t tiers;            // tiers * dim / 8 is below 255; 0: points are by similarity
    int64_t candidates;       // tokens that are reranked, at most
    int64_t block_len;        // tokens of a block, a power of two from 64 on
    int64_t sample_count;
    int32_t mean_query;       // one query for the group, the mean of its own
    float worth;              // of a product with a mean key, see points_of_product in paris/codes.py
};

// Inner products of proxies of queries and keys, and the best of them.
struct hfk_proxy {
    const float *query;     // [batch, query_heads, queries, rank], scaled
    const float *offset;    // [batch, query_heads, queries], added to a query's scores; or null
    const void *rows;       // [batch, sets, *, rank], rows contiguous
    int64_t batch_stride;   // elements
    int64_t set_stride;
    int64_t sets;           // a divisor of query_heads; consecutive heads read one
    int64_t rank;           // at most key_dim
    int32_t dtype;          // of rows
    int32_t reserved;
};

// Scores of codewords, of which each token has one, and the best tokens.
struct hfk_codebook {
    const float *table;     // [batch, query_heads, queries, words]
    const uint16_t *codes;  // [batch, id_heads, *], below `words` wherever a token is valid
    int64_t batch_stride;   // elements
    int64_t head_stride;
    int64_t words;          // at most 2^15
};

// Centroids of one age: past queries of a group, each with a list of tokens.
struct hfk_generation {
    const void *queries;    // [batch, id_heads, *, group, key_dim], of the step's dtype
    const float *inverse;   // [batch, id_heads, *, group]: 1 over their lengths in the metric
    const int64_t *slots;   // [batch, *]: negative where there is no centroid
    const uint16_t *low;    // [batch, id_heads, *, width]: the low 16 bits of a token plus 1; 0: none
    const uint8_t *high;    // the 8 bits above; null: none has any
    int64_t query_batch;    // strides in elements
    int64_t query_head;
    int64_t inverse_batch;
    int64_t inverse_head;
    int64_t slot_batch;
    int64_t low_batch;
    int64_t low_head;
    int64_t high_batch;
    int64_t high_head;
    int64_t count;
};

// The lists of the `nprobe` centroids nearest to a query, by the mean or the largest cosine of the
// group's heads, and the best of their tokens by exact scores; of equal ones the lowest.
struct hfk_lists {
    struct hfk_generation generations[2];
    const float *metric;    // [batch, id_heads, key_dim, key_dim], symmetric: of inner products;
                            // null: the dot product
    int64_t metric_batch;   // elements
    int64_t metric_head;
    int64_t width;
    int64_t nprobe;
    int64_t pending;        // newest tokens that are recalled with every list
    int64_t following;      // tokens that are recalled behind each of a list's first so many
    int64_t largest;        // not 0: the largest cosine
};

// Results of the stages of a search, for tests; each array may be null. G is 1 with `mean_query`,
// else query_heads / id_heads.
struct hfk_paris_trace {
    float *rotated;           // [batch, id_heads, queries, G, dim]
    uint8_t *points;          // [batch, id_heads, queries, G, dim / 8, 256], of each sign byte
    uint8_t *drops;           // [batch, id_heads, queries, G, blocks]: points that its tokens lose
    uint8_t *scores;          // [batch, id_heads, queries, tokens]: points + 1, 0 for excluded ones
    int32_t *candidates;      // [batch, id_heads, queries, candidates]; -1 behind the last one
    float *estimates;         // [batch, id_heads, queries, G, candidates]
};

HFK_API int32_t hfk_version(void);

/* SHA-256 in hex of the names and digests of CMakeLists.txt and of all files of csrc. */
HFK_API const char *hfk_sources(void);

// 1 where `path` was compiled and the processor has its instructions.
HFK_API int32_t hfk_has_path(int32_t path);

// Softmax attention of each query over its rows: `out` 0 and `lse` -inf without rows. Query heads
// that share ids are served by one read of each row. NaN and Inf in rows stay in the queries that
// read them. Safe from several threads at once.
HFK_API int32_t hfk_attend(const struct hfk_request *request);

// scale * q.k, capped, of each query and each of its ids; -inf for holes. Reads keys alone.
HFK_API int32_t hfk_scores(const struct hfk_request *request);

// The `wanted` ids of the highest relevance, best first, then -1. A token is as relevant as the
// largest of the softmax weights that the query heads of its ids give it; of equal ones the first in
// `ids` comes first. Tokens whose score is NaN or -inf are never chosen.
HFK_API int32_t hfk_rank(const struct hfk_ranking *request);

// ParisKV's codes of keys. NaN codes as a number that is not above any level, with a weight of NaN.
HFK_API int32_t hfk_paris_encode(const struct hfk_paris_encoding *request);

// Softmax attention of each query to the tokens that it sees: `out` 0 and `lse` -inf where there is
// none. Products, softmax and sums are fp32; HFK_AVX512_BF16 rounds the softmax weights of bf16 rows to
// bf16 before they meet the values. For bf16 HFK_AUTO is HFK_AVX512 on processors with AVX-512 that are
// not AMD's. With `block_len` it computes log-sum-exps of scores alone, and
// `values`, `out` and `lse` may be null.
HFK_API int32_t hfk_prompt_attention(const struct hfk_prompt *request);

// For a grid [count, 2] the points that are nearest to some pair of a cell, ascending, and behind them
// the last one again and again: near [HFK_CELLS, HFK_CELLS, HFK_NEAR]. Cells fill the square of pairs
// with both numbers from -HFK_REACH to HFK_REACH. HFK_BAD_REQUEST where a cell has more than HFK_NEAR.
HFK_API int32_t hfk_near_points(const float *grid, int64_t count, uint8_t *near);

// Codes and scales of rows. A group with NaN or Inf gets the scale NaN.
HFK_API int32_t hfk_encode(const struct hfk_codes *work);

// Rows of codes and scales, and what is added to them.
HFK_API int32_t hfk_decode(const struct hfk_codes *work);

// x times the transpose of the weight, plus the bias. Sums are fp32; the weight is read once.
HFK_API int32_t hfk_run_product(const struct hfk_product *work);

// The step: `out` as of hfk_attend, over the window and the ids; `lse` may be null. Queries of a KV
// head share its ids: id_heads is kv_heads where there is a search, but for HFK_SEARCH_PROXY.
HFK_API int32_t hfk_run_step(const struct hfk_step *step);

// The search of a step alone, on one thread: writes `ids`, and what `trace` asks for. The search
// must be HFK_SEARCH_PARIS where `trace` is not null.
HFK_API int32_t hfk_search_ids(const struct hfk_step *step, const struct hfk_paris_trace *trace);

// exp of `count` numbers that are not positive, as the softmax of `path` has it; for tests. Below
// -87.3 the result is 0.
HFK_API int32_t hfk_exp(int32_t path, const float *in, float *out, int64_t count);
