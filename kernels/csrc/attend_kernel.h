// The kernels, written once for every instruction set. See rows.h on linkage.
//
// Rows go through in blocks: all query heads of the selection are scored against a block, then its
// values are added to all their sums. So a row comes from memory once, and from a cache after that.
#pragma once

#include "many_heads.h"
#include "vector_math.h"

namespace {

template <class I, class T>
void load_query(const hfk_request &request, const Span &span, Workspace &space) {
    const int64_t head = span.batch * request.query_heads + span.id_head * space.heads;
    const T *given = static_cast<const T *>(request.query) +
                     (head * request.queries + span.query) * request.key_dim;
    space.given = given;
    space.given_stride = request.queries * request.key_dim;
    for (int64_t g = 0; g < space.heads; ++g) {
        const T *from = given + g * space.given_stride;
        float *to = space.query + g * space.query_stride;
        int64_t d = 0;
        for (; d + 2 * I::lanes <= request.key_dim; d += 2 * I::lanes) {
            typename I::V a, b;
            I::load_pair(from + d, a, b);
            I::store(to + d, a);
            I::store(to + d + I::lanes, b);
        }
        for (; d + I::lanes <= request.key_dim; d += I::lanes) I::store(to + d, I::load(from + d));
        if (d < request.key_dim) {
            I::store(to + d, I::load_some(from + d, static_cast<int>(request.key_dim - d)));
        }
    }
}

// Scores of a block to softmax weights, relative to the largest score so far; says in `rescale` what
// earlier weights must be multiplied with.
template <class I>
void weigh(float *scores, int count, float *largest, float *weight_sums, float *rescale) {
    using V = typename I::V;
    const int64_t end = padded(count);
    for (int64_t r = count; r < end; ++r) scores[r] = -__builtin_inff();
    V top = I::load(scores);
    for (int64_t j = I::lanes; j < end; j += I::lanes) top = I::max(top, I::load(scores + j));
    const float block_largest = I::largest(top);
    const float before = *largest;
    *largest = block_largest > before ? block_largest : before;
    // Rows may all have the score -inf; their weights are 0, as they would be beside any other row.
    const float base = *largest == -__builtin_inff() ? 0.0f : *largest;
    V sum = I::load(weight_sums);
    *rescale = 1.0f;
    if (before != base) {
        float factor[I::lanes];
        I::store(factor, exp_of_nonpositive<I>(I::set1(before - base)));
        *rescale = factor[0];
        sum = sum * I::set1(factor[0]);
    }
    for (int64_t j = 0; j < end; j += I::lanes) {
        const V weights = exp_of_nonpositive<I>(I::load(scores + j) - I::set1(base));
        I::store(scores + j, weights);
        sum = sum + weights;
    }
    I::store(weight_sums, sum);
}

// Calls work(first_head, number_of_heads as a constant) over all heads, in tiles that fit registers.
template <int Most, class Work> void for_head_tiles(int64_t heads, Work &&work) {
    int64_t g = 0;
    for (; g + Most <= heads; g += Most) work.template operator()<Most>(g);
    if constexpr (Most > 1) {
        const int64_t rest = heads - g;
        if (Most > 3 && rest == 3) work.template operator()<(Most > 3 ? 3 : 1)>(g);
        if (Most > 2 && rest == 2) work.template operator()<(Most > 2 ? 2 : 1)>(g);
        if (rest == 1) work.template operator()<1>(g);
    }
}

template <class I, class T> struct DotTiles {
    const Block &block;
    int64_t dim;
    const Workspace &space;

    template <int H> void operator()(int64_t g) {
        const Queries queries = {
            space.query + g * space.query_stride, space.query_stride,
            static_cast<const T *>(space.given) + g * space.given_stride, space.given_stride};
        dot_heads<I, T, H>(block, queries, dim, space.scores + g * kBlock);
    }
};

template <class I, class T> struct ValueTiles {
    const Block &block;
    const hfk_request &request;
    const Workspace &space;

    template <int H> void operator()(int64_t g) {
        add_values<I, T, H>(block, request.value_dim, space.scores + g * kBlock,
                            space.rescale + g, space.sums + g * space.sum_stride,
                            space.sum_stride);
    }
};

// Products of some query heads at once with rows: the sums of a few fit registers.
template <class I, class T> struct FewHeads {
    const hfk_request &request;
    const Workspace &space;

    void score(const Block &block) const {
        for_head_tiles<I::heads>(space.heads, DotTiles<I, T>{block, request.key_dim, space});
    }

    void add_values(const Block &block) const {
        for_head_tiles<I::heads>(space.heads, ValueTiles<I, T>{block, request, space});
    }
};

// Scores a stream. For each block it calls work(block, head, its scores), head by head, and
// end(block).
template <class I, class Stream, class Products, class Work, class End>
void for_blocks(const hfk_request &request, const Workspace &space, Stream &stream,
                Products &products, const Work &work, const End &end) {
    const float scale = static_cast<float>(request.scale);
    const float softcap = static_cast<float>(request.softcap);
    Block block;
    for (stream.take(block); block.count > 0; stream.take(block)) {
        products.score(block);
        for (int64_t g = 0; g < space.heads; ++g) {
            float *scores = space.scores + g * kBlock;
            finish_scores<I>(scores, padded(block.count), scale, softcap, space.mean_scores[g]);
            work(block, g, scores);
        }
        end(block);
    }
}

// Adds the rows of a stream to the sums of all heads. First `hide` may change scores.
template <class I, class Stream, class Products, class Hide>
void absorb(const hfk_request &request, const Workspace &space, Stream &stream, Products &&products,
            const Hide &hide) {
    for_blocks<I>(request, space, stream, products,
                  [&](const Block &block, int64_t g, float *scores) {
                      hide(block, g, scores);
                      weigh<I>(scores, block.count, space.largest + g,
                               space.weight_sums + g * kPad, space.rescale + g);
                  },
                  [&](const Block &block) { products.add_values(block); });
}

inline void hide_nothing(const Block &, int64_t, float *) {}

// The span's rows of the window that its query sees: its own token is the newest of them.
inline DenseStream window_stream(const hfk_request &request, const hfk_window &window,
                                 const Span &span, int64_t element_bytes) {
    const int64_t kv_head = span.id_head / (request.id_heads / request.kv_heads);
    const int64_t first =
        (span.batch * request.kv_heads + kv_head) * window.capacity + span.near_first;
    const int64_t after = request.queries - 1 - span.query;
    const int64_t seen = window.length - after;
    const int64_t last = span.near_last < seen ? span.near_last : seen;
    const int64_t key_bytes = request.key_dim * element_bytes;
    const int64_t value_bytes = window.value_row * element_bytes;
    const uint8_t *valid = window.valid;
    if (valid != nullptr) valid += span.batch * window.valid_stride + span.near_first;
    return DenseStream(static_cast<const char *>(window.keys) + first * key_bytes, key_bytes,
                       static_cast<const char *>(window.values) + first * value_bytes, value_bytes,
                       last - span.near_first, valid);
}

template <class I> float sum_of_weights(const Workspace &space, int64_t g) {
    const typename I::V sums = I::load(space.weight_sums + g * kPad);
    float total[4];
    I::store_sums(total, sums, sums, sums, sums);
    return total[0];
}

template <class I> float log_sum_of_weights(const Workspace &space, int64_t g) {
    const float total = sum_of_weights<I>(space, g);
    return total == 0.0f ? -__builtin_inff() : space.largest[g] + __builtin_logf(total);
}

// A head's sums over weights to the result; `in_pairs`: sums are in the order of pairs.
template <class I, bool in_pairs>
void finish(const Workspace &space, int64_t g, int64_t value_dim, float *to, float *lse) {
    const float total = sum_of_weights<I>(space, g);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    const float *sums = space.sums + g * space.sum_stride;
    int64_t d = 0;
    if constexpr (in_pairs) {
        for (; d + 2 * I::lanes <= value_dim; d += 2 * I::lanes) {
            for (int i = 0; i < I::lanes; ++i) {
                to[d + 2 * i] = sums[d + i] * factor;
                to[d + 2 * i + 1] = sums[d + I::lanes + i] * factor;
            }
        }
    }
    for (; d < value_dim; ++d) to[d] = sums[d] * factor;
    *lse = log_sum_of_weights<I>(space, g);
}

// Numbers in the order of pairs to their own, in place.
template <class I, class T> void to_own_order(float *numbers, int64_t dim) {
    if constexpr (splits<T>) {
        float pair[2 * I::lanes];
        for (int64_t d = 0; d + 2 * I::lanes <= dim; d += 2 * I::lanes) {
            for (int i = 0; i < I::lanes; ++i) {
                pair[2 * i] = numbers[d + i];
                pair[2 * i + 1] = numbers[d + I::lanes + i];
            }
            std::memcpy(numbers + d, pair, sizeof pair);
        }
    }
}

// Queries as coded keys lie, and their products with what was taken off these.
template <class I, class T>
void turn_queries(const hfk_request &request, const Span &span, Workspace &space) {
    const hfk_coding &coding = *request.coding;
    const int64_t kv_head = span.id_head / (request.id_heads / request.kv_heads);
    const int64_t head = span.batch * request.kv_heads + kv_head;
    for (int64_t g = 0; g < space.heads; ++g) {
        float *query = space.query + g * space.query_stride;
        to_own_order<I, T>(query, request.key_dim);
        for (int64_t d = 0; coding.key_mean != nullptr && d < request.key_dim; ++d) {
            space.mean_scores[g] += query[d] * coding.key_mean[head * request.key_dim + d];
        }
        turn<I>(coding, query, request.key_dim, true);
    }
}

// `attend` goes on here where rows are in codes; the rows of its window are plain numbers.
template <class I, class T>
bool attend_coded(const hfk_request &request, const hfk_window *window, const Span &span,
                  Workspace &space, float *out, int64_t out_stride, float *lse,
                  int64_t lse_stride) {
    const hfk_coding &coding = *request.coding;
    CodedStream<I> chosen(request, span, space.coded, true);
    if (window != nullptr) {
        DenseStream rows = window_stream(request, *window, span, sizeof(T));
        absorb<I>(request, space, rows, FewHeads<I, T>{request, space}, hide_nothing);
    }
    turn_queries<I, T>(request, span, space);
    for (int64_t g = 0; g < space.heads; ++g) {
        float *sums = space.sums + g * space.sum_stride;
        to_own_order<I, T>(sums, request.value_dim);
        turn<I>(coding, sums, request.value_dim, true);
    }
    absorb<I>(request, space, chosen, FewHeads<I, float>{request, space}, hide_nothing);
    for (int64_t g = 0; g < space.heads; ++g) {
        turn<I>(coding, space.sums + g * space.sum_stride, request.value_dim, false);
    }
    for (int64_t g = 0; g < space.heads; ++g) {
        finish<I, false>(space, g, request.value_dim, out + g * out_stride, lse + g * lse_stride);
    }
    return chosen.is_whole();
}

// `attend` of plain rows. Sums are `in_pairs` where the products leave them in that order.
template <class I, class T, bool in_pairs, class Products>
bool attend_rows(const hfk_request &request, const hfk_window *window, const Span &span,
                 const Workspace &space, Products &&products, float *out, int64_t out_stride,
                 float *lse, int64_t lse_stride) {
    // The stream asks for its first rows at once: they come while the window is read.
    RowStream chosen(request, span, sizeof(T), true);
    if (window != nullptr) {
        DenseStream rows = window_stream(request, *window, span, sizeof(T));
        absorb<I>(request, space, rows, products, hide_nothing);
    }
    absorb<I>(request, space, chosen, products, hide_nothing);
    for (int64_t g = 0; g < space.heads; ++g) {
        finish<I, in_pairs>(space, g, request.value_dim, out + g * out_stride, lse + g * lse_stride);
    }
    return chosen.is_whole();
}

// Products of a span's query heads.
template <class I, class T>
ManyHeads<I, T> many_heads(const hfk_request &request, const Span &span, Workspace &space) {
    const int64_t head = span.batch * request.query_heads + span.id_head * space.heads;
    const T *from = static_cast<const T *>(request.query) +
                    (head * request.queries + span.query) * request.key_dim;
    const int64_t row = request.queries * request.key_dim;
    return ManyHeads<I, T>(request, space, [from, row](int64_t g) { return from + g * row; });
}

template <class I, class T>
bool attend(const hfk_request &request, const hfk_window *window, const Span &span,
            float *scratch, float *out, int64_t out_stride, float *lse, int64_t lse_stride) {
    Workspace space(request, scratch);
    clear(space);
    if (goes_in_panels(request)) {
        return attend_rows<I, T, false>(request, window, span, space,
                                        many_heads<I, T>(request, span, space), out, out_stride,
                                        lse, lse_stride);
    }
    load_query<I, T>(request, span, space);
    if (request.coding != nullptr) {
        return attend_coded<I, T>(request, window, span, space, out, out_stride, lse, lse_stride);
    }
    return attend_rows<I, T, splits<T>>(request, window, span, space,
                                        FewHeads<I, T>{request, space}, out, out_stride, lse,
                                        lse_stride);
}

// Scores of the rows of a stream.
template <class I, class Stream, class Products>
bool score_rows(const hfk_request &request, Workspace &space, Stream &&stream, Products &&products,
                float *out, int64_t out_stride) {
    for_blocks<I>(request, space, stream, products,
                  [&](const Block &block, int64_t g, const float *scores) {
                      float *to = out + g * out_stride;
                      for (int r = 0; r < block.count; ++r) to[block.places[r]] = scores[r];
                  },
                  [](const Block &) {});
    return stream.is_whole();
}

template <class I, class T>
bool score(const hfk_request &request, const Span &span, float *scratch, float *out,
           int64_t out_stride) {
    for (int64_t g = 0; g < request.query_heads / request.id_heads; ++g) {
        std::fill(out + g * out_stride + span.first, out + g * out_stride + span.last,
                  -__builtin_inff());
    }
    Workspace space(request, scratch);
    std::fill_n(space.mean_scores, space.heads, 0.0f);
    if (goes_in_panels(request)) {
        return score_rows<I>(request, space, RowStream(request, span, sizeof(T), false),
                             many_heads<I, T>(request, span, space), out, out_stride);
    }
    load_query<I, T>(request, span, space);
    if (request.coding != nullptr) {
        turn_queries<I, T>(request, span, space);
        return score_rows<I>(request, space, CodedStream<I>(request, span, space.coded, false),
                             FewHeads<I, float>{request, space}, out, out_stride);
    }
    return score_rows<I>(request, space, RowStream(request, span, sizeof(T), false),
                         FewHeads<I, T>{request, space}, out, out_stride);
}

template <class I> struct Entry {
    static bool attend_any(const hfk_request &request, const hfk_window *window, const Span &span,
                           float *scratch, float *out, int64_t out_stride, float *lse,
                           int64_t lse_stride) {
        auto *run = request.dtype == HFK_BFLOAT16  ? attend<I, Bf16>
                    : request.dtype == HFK_FLOAT16 ? attend<I, Half>
                                                   : attend<I, float>;
        return run(request, window, span, scratch, out, out_stride, lse, lse_stride);
    }

    static bool score_any(const hfk_request &request, const Span &span, float *scratch, float *out,
                          int64_t out_stride) {
        auto *run = request.dtype == HFK_BFLOAT16  ? score<I, Bf16>
                    : request.dtype == HFK_FLOAT16 ? score<I, Half>
                                                   : score<I, float>;
        return run(request, span, scratch, out, out_stride);
    }

    static void exp_all(const float *in, float *out, int64_t count) {
        for (int64_t i = 0; i < count; i += I::lanes) {
            const int n = count - i < I::lanes ? static_cast<int>(count - i) : I::lanes;
            float result[I::lanes];
            I::store(result, exp_of_nonpositive<I>(I::load_some(in + i, n)));
            for (int j = 0; j < n; ++j) out[i + j] = result[j];
        }
    }
};

} // namespace
