// Searches of the fuzz driver's steps.
#pragma once

#include <functional>

#include "fuzz.h"

// The number `dim` of a cold token's key; NaN where the token has no row.
using KeyNumber = std::function<double(int64_t batch, int64_t head, int64_t token, int64_t dim)>;

// A search of random numbers, and what it must find.
class SearchCase {
  public:
    virtual ~SearchCase() = default;

    // The interface's struct of the search.
    virtual const void *request() const = 0;

    // Whether a step with this search must be refused.
    virtual bool leads_astray(const hfk_step &) const { return false; }

    // Runs hfk_search_ids on a step with this search. Null where its ids are right, else what is
    // wrong with them.
    virtual const char *run(const hfk_step &step, const Numbers &query,
                            const KeyNumber &key) const = 0;
};

// A search for the step's kind and sizes; sets the step's tokens.
std::unique_ptr<SearchCase> make_search_case(Random &random, hfk_step &step);
std::unique_ptr<SearchCase> make_paris_case(Random &random, hfk_step &step);
std::unique_ptr<SearchCase> make_list_case(Random &random, hfk_step &step);

// Strides of [outer, inner, tokens, dim] with room behind the tokens or behind the heads, or without.
struct Strides {
    Strides(Random &random, int64_t inner, int64_t tokens, int64_t dim)
        : row((tokens + (random.one_in(2) ? 0 : random.pick(0, 9))) * dim),
          outer(inner * row + (random.one_in(2) ? 0 : random.pick(0, 9))) {}

    // Up to the last element that is used.
    int64_t size(int64_t outers, int64_t inners, int64_t tokens, int64_t dim) const {
        return (outers - 1) * outer + (inners - 1) * row + tokens * dim;
    }

    int64_t row, outer;
};

// Numbers [outer, inner, tokens, dim]; those between are NaN.
Numbers strided(Random &random, const Strides &strides, int64_t outers, int64_t inners,
                int64_t tokens, int64_t dim, int32_t dtype);

// Null where `ids` are those of the `count` most relevant tokens, ascending and then -1; tokens of
// relevance -inf are none. Relevances are good up to `error`.
const char *judge_best(const int32_t *ids, int64_t count, const std::vector<double> &relevance,
                       double error);

// The largest of the log-softmaxes of the heads [heads, n]; of one head its scores. Adds to `error`
// what roundings of fp32 may make of it.
std::vector<double> group_relevance(const std::vector<std::vector<double>> &scores, double &error);

// A number of tokens: none, one, some, or up to `most` of them.
int64_t pick_tokens(Random &random, int64_t most);
