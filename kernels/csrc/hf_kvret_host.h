// C interface of the host attention library: attention over chosen rows in host memory.
//
// A row is a key followed by its value. Rows lie in pages [kv_heads, page_len, key_dim + value_dim],
// a page is found by its address, and `table` maps the tokens of a batch row to page numbers. Nothing
// is read for a token number beyond the table, or in a table entry without a page: the request fails.
#pragma once

#include <stdint.h>

#define HFK_API extern "C" __attribute__((visibility("default")))

// Raised with every change of hfk_request or of a function's meaning; the caller compares.
#define HFK_VERSION 3

enum hfk_dtype { HFK_FLOAT32 = 0, HFK_FLOAT16 = 1, HFK_BFLOAT16 = 2 };

// Implementations; each gives the same results up to rounding.
enum hfk_path { HFK_AUTO = -1, HFK_PORTABLE = 0, HFK_AVX2 = 1, HFK_AVX512 = 2, HFK_AVX512_BF16 = 3 };

enum hfk_status {
    HFK_OK = 0,
    HFK_NO_MEMORY = 1,
    HFK_NO_PATH = 2,     // the path is unknown, was not compiled, or the processor lacks it
    HFK_BAD_REQUEST = 3, // an unknown dtype, or sizes that do not divide as they must
    HFK_BAD_ID = 4       // an id that leads to no row; `out` and `lse` may hold anything
};

// All arrays are contiguous; sizes count elements.
struct hfk_request {
    const void *query;      // [batch, query_heads, queries, key_dim], of `dtype`
    const int32_t *ids;     // [batch, id_heads, queries, count]; negative is a hole
    const int32_t *table;   // [batch, max_pages]: page numbers
    const int64_t *pages;   // byte address of every page
    float *out;             // attend: [batch, query_heads, queries, value_dim]
                            // scores: [batch, query_heads, queries, count]
    float *lse;             // attend: [batch, query_heads, queries], natural log; scores: unused
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
    double scale;           // factor of the dot products
    double softcap;         // c of c * tanh(scale * q.k / c); 0 for none
    int32_t dtype;          // of query and rows
    int32_t path;
    int32_t threads;        // at most; the calling thread is one of them
    int32_t reserved;
};

// What the best tokens are chosen from; all arrays are contiguous.
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
    int32_t reserved;
};

HFK_API int32_t hfk_version(void);

// 1 where `path` was compiled and the processor has its instructions.
HFK_API int32_t hfk_has_path(int32_t path);

// Softmax attention of each query over its rows: `out` 0 and `lse` -inf without rows. Query heads
// that share ids are served by one read of each row. NaN and Inf in rows stay in the queries that
// read them. Safe from several threads at once, and after fork.
HFK_API int32_t hfk_attend(const struct hfk_request *request);

// scale * q.k, capped, of each query and each of its ids; -inf for holes. Reads keys alone.
HFK_API int32_t hfk_scores(const struct hfk_request *request);

// The `wanted` ids of the highest relevance, best first, then -1. A token is as relevant as the
// largest of the softmax weights that the query heads of its ids give it; of equal ones the first in
// `ids` comes first. Tokens whose score is NaN or -inf are never chosen.
HFK_API int32_t hfk_rank(const struct hfk_ranking *request);

// exp of `count` numbers that are not positive, as the softmax of `path` has it; for tests. Below
// -87.3 the result is 0.
HFK_API int32_t hfk_exp(int32_t path, const float *in, float *out, int64_t count);
