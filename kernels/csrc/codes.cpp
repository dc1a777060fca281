// Rows to and from codes, on several threads.
#include "job.h"

bool is_good(const hfk_coding &coding, int64_t width) {
    const int64_t group = coding.group;
    return coding.bits >= 2 && coding.bits <= 4 && group >= 8 && group <= 1024 &&
           (group & (group - 1)) == 0 && width > 0 && width % group == 0;
}

namespace {

// Rows of an item: enough that handing it out costs nothing beside it.
constexpr int64_t kItemNumbers = int64_t{1} << 14;

using CodeRows = void (*)(const hfk_codes &work, int64_t first, int64_t last);

struct CodeJob {
    const hfk_codes &codes;
    CodeRows run;
    int64_t rows; // of an item

    void work(int64_t item, int) const {
        run(codes, item * rows, std::min((item + 1) * rows, codes.rows));
    }
};

int32_t serve(const hfk_codes &work, CodeRows Kernel::*function) {
    const bool is_known = work.dtype >= HFK_FLOAT32 && work.dtype <= HFK_BFLOAT16;
    const bool is_whole = is_known && work.rows >= 0 && is_good(work.coding, work.width);
    return serve(is_whole, work.path, [&](const Kernel &kernel) {
        const int64_t rows = std::max<int64_t>(1, kItemNumbers / work.width);
        CodeJob job{work, kernel.*function, rows};
        const int32_t threads = std::clamp(work.threads, 1, kMostThreads);
        Pool::instance().run((work.rows + rows - 1) / rows, threads, job);
        return HFK_OK;
    });
}

} // namespace

int32_t hfk_near_points(const float *grid, int64_t count, uint8_t *near) {
    if (count < 1 || count > 256) return HFK_BAD_REQUEST;
    constexpr float kCell = 2.0f * HFK_REACH / HFK_CELLS;
    // A little is allowed for rounding at the edges.
    constexpr float kSlack = 1e-4f;
    // Squares of the least and the largest distance of a point's x, then y, to the cells of a number.
    std::vector<float> least(2 * HFK_CELLS * count), most(least.size());
    for (int64_t i = 0; i < 2 * HFK_CELLS * count; ++i) {
        const int64_t point = i % count, cell = i / count % HFK_CELLS, axis = i / count / HFK_CELLS;
        const float start = cell * kCell - HFK_REACH - grid[2 * point + axis];
        const float end = start + kCell;
        const float below = std::max(start, 0.0f), above = std::max(-end, 0.0f);
        least[i] = (below + above) * (below + above);
        most[i] = std::max(start * start, end * end);
    }
    for (int64_t cell = 0; cell < HFK_CELLS * HFK_CELLS; ++cell) {
        const int64_t x = cell / HFK_CELLS * count, y = (HFK_CELLS + cell % HFK_CELLS) * count;
        float limit = std::numeric_limits<float>::infinity();
        for (int64_t p = 0; p < count; ++p) limit = std::min(limit, most[x + p] + most[y + p]);
        uint8_t *own = near + cell * HFK_NEAR;
        int found = 0;
        for (int64_t p = 0; p < count; ++p) {
            if (least[x + p] + least[y + p] > limit + kSlack) continue;
            if (found == HFK_NEAR) return HFK_BAD_REQUEST;
            own[found++] = static_cast<uint8_t>(p);
        }
        for (int i = found; i < HFK_NEAR; ++i) own[i] = own[found - 1];
    }
    return HFK_OK;
}

int32_t hfk_encode(const hfk_codes *work) { return serve(*work, &Kernel::encode); }

int32_t hfk_decode(const hfk_codes *work) {
    if (work->added != nullptr && work->added_every < 1) return HFK_BAD_REQUEST;
    return serve(*work, &Kernel::decode);
}
