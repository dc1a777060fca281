// Random requests to the library against plain arithmetic in double; to be run under sanitizers.
//
//   hf_kvret_fuzz [requests] [seed] [path]
//
// `path` is the number of an hfk_path; without it all that the processor has take turns. Exits with
// 1 at the first result that is wrong.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "fuzz.h"

namespace {

bool fuzz(int64_t requests, uint64_t seed, int32_t path) {
    Random random(seed, path);
    for (int64_t i = 0; i < requests; ++i) {
        const char *fault = fuzz_attention(random);
        if (fault == nullptr) fault = fuzz_step(random);
        if (fault == nullptr) fault = fuzz_product(random);
        if (fault == nullptr) fault = fuzz_prompt(random);
        if (fault == nullptr) fault = fuzz_codes(random);
        if (fault == nullptr) fault = fuzz_encoding(random);
        if (fault != nullptr) {
            std::fprintf(stderr, "seed %llu: request %lld went wrong: %s\n",
                         static_cast<unsigned long long>(seed), static_cast<long long>(i), fault);
            return false;
        }
    }
    return true;
}

} // namespace

int main(int count, char **arguments) {
    const int64_t requests = count > 1 ? std::atoll(arguments[1]) : 200;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    const int32_t path = count > 3 ? std::atoi(arguments[3]) : Random::kAnyPath;
    if (path != Random::kAnyPath && !hfk_has_path(path)) {
        std::fprintf(stderr, "path %d: this processor lacks it, or it was not compiled\n", path);
        return 1;
    }
    for (int32_t each = HFK_PORTABLE; each <= HFK_NEON; ++each) {
        if ((path != Random::kAnyPath && path != each) || !hfk_has_path(each)) continue;
        if (const char *fault = check_numbers(each, seed)) {
            std::fprintf(stderr, "path %d went wrong: %s\n", each, fault);
            return 1;
        }
    }
    // Two callers at once share the pool of threads.
    bool other = false;
    std::thread caller([&] { other = fuzz(requests, seed + 1, path); });
    const bool mine = fuzz(requests, seed, path);
    caller.join();
    if (!mine || !other) return 1;
    std::printf("%lld requests, all right\n", static_cast<long long>(2 * requests));
    return 0;
}
