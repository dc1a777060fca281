// What a translation unit for one instruction set gives to the dispatcher.
#pragma once

#include "hf_kvret_host.h"

// One selection: the ids of a batch row, head and query, from `first` up to `last`.
struct Span {
    int64_t batch;
    int64_t id_head;
    int64_t query;
    int64_t first;
    int64_t last;
};

struct Kernel {
    // Floats that attend and score need to work in, for a request of any dtype.
    int64_t (*scratch_floats)(const hfk_request &request);

    // Attention of the query heads that share the span's ids, over the span. Head g's result goes to
    // out + g * out_stride and lse + g * lse_stride. False where an id leads to no row.
    bool (*attend)(const hfk_request &request, const Span &span, float *scratch, float *out,
                   int64_t out_stride, float *lse, int64_t lse_stride);

    // Scores of the span's ids; head g's go to out + g * out_stride, at their places in the ids.
    // False where an id leads to no row.
    bool (*score)(const hfk_request &request, const Span &span, float *scratch, float *out,
                  int64_t out_stride);

    void (*exp)(const float *in, float *out, int64_t count);
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
