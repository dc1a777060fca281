#include "files.h"

#include <algorithm>
#include <atomic>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/resource.h>

namespace {

// Blocks of 512 bytes that a process reads from its disks while no row is missing.
constexpr int64_t kFewBlocks = 256;
constexpr int64_t kMemoryPage = 4096;

std::atomic<int64_t> blocks_read{0};

} // namespace

bool misses_rows(const hfk_request &request) {
    rusage use;
    if (!request.in_files || getrusage(RUSAGE_SELF, &use) != 0) return false;
    return use.ru_inblock - blocks_read.exchange(use.ru_inblock) > kFewBlocks;
}

void ask_for_rows(const hfk_request &request, const Span &span) {
    const int64_t row_bytes = request.row_dim * (request.dtype == HFK_FLOAT32 ? 4 : 2);
    const int64_t kv_head = span.id_head / (request.id_heads / request.kv_heads);
    const int32_t *table = request.table + span.batch * request.max_pages;
    std::vector<int64_t> wanted;
    wanted.reserve(2 * (span.last - span.first));
    for (int64_t i = span.first; i < span.last; ++i) {
        const int32_t id = span.ids[i];
        // One comparison finds both ends: as unsigned, negative numbers exceed all counts.
        if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(request.tokens)) continue;
        const int32_t page = table[id / request.page_len];
        if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(request.page_count)) continue;
        const int64_t row = kv_head * request.page_len + id % request.page_len;
        const int64_t address = request.pages[page] + row * row_bytes;
        wanted.push_back(address / kMemoryPage);
        wanted.push_back((address + row_bytes - 1) / kMemoryPage);
    }
    std::sort(wanted.begin(), wanted.end());
    // Memory pages that follow each other are asked for at once.
    for (size_t first = 0, next; first < wanted.size(); first = next) {
        for (next = first + 1; next < wanted.size(); ++next) {
            if (wanted[next] > wanted[next - 1] + 1) break;
        }
        const int64_t count = wanted[next - 1] - wanted[first] + 1;
        madvise(reinterpret_cast<void *>(wanted[first] * kMemoryPage), count * kMemoryPage,
                MADV_WILLNEED);
    }
}

#else

bool misses_rows(const hfk_request &) { return false; }

void ask_for_rows(const hfk_request &, const Span &) {}

#endif
