#include "search.h"

std::unique_ptr<Search> make_search(const hfk_step &step, const Kernel &kernel) {
    if (step.tokens < 0) return nullptr;
    // Heads of a group may choose for themselves by proxies alone.
    const bool shares = step.attention.id_heads == step.attention.kv_heads;
    if (!shares && step.search_kind != HFK_SEARCH_PROXY) return nullptr;
    switch (step.search_kind) {
    case HFK_SEARCH_FLAT:
        return make_flat_search(step, kernel);
    case HFK_SEARCH_PARIS:
        return make_paris_search(step, kernel);
    case HFK_SEARCH_PROXY:
        return make_proxy_search(step, kernel);
    case HFK_SEARCH_CODEBOOK:
        return make_codebook_search(step, kernel);
    case HFK_SEARCH_LISTS:
        return make_list_search(step, kernel);
    default:
        return nullptr;
    }
}
