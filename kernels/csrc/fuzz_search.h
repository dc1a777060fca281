// Searches of the fuzz driver's steps.
#pragma once

#include "fuzz.h"

// A search of random numbers, and what it must find.
class SearchCase {
  public:
    virtual ~SearchCase() = default;

    // The interface's struct of the search.
    virtual const void *request() const = 0;

    // Runs hfk_search_ids on a step with this search. Null where its ids are right, else what is
    // wrong with them.
    virtual const char *run(const hfk_step &step, const Numbers &query) const = 0;
};

// A search for the step's kind and sizes; sets the step's tokens.
std::unique_ptr<SearchCase> make_search_case(Random &random, hfk_step &step);
std::unique_ptr<SearchCase> make_paris_case(Random &random, hfk_step &step);

// Null where `ids` are those of the `count` most relevant tokens, ascending and then -1; tokens of
// relevance -inf are none. Relevances are good up to `error`.
const char *judge_best(const int32_t *ids, int64_t count, const std::vector<double> &relevance,
                       double error);

// The largest of the log-softmaxes of the heads [heads, n]; of one head its scores. Adds to `error`
// what roundings of fp32 may make of it.
std::vector<double> group_relevance(const std::vector<std::vector<double>> &scores, double &error);

// A number of tokens: none, one, some, or up to `most` of them.
int64_t pick_tokens(Random &random, int64_t most);
