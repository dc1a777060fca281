// Products of a weight and few tokens, on several threads.
#include <new>

#include "job.h"

namespace {

// Further threads pay from so many numbers of a weight on.
constexpr int64_t kThreadNumbers = int64_t{1} << 15;

struct ProductJob {
    const hfk_product &work;
    const Kernel &kernel;
    int64_t outputs; // of an item
    std::vector<float> x;
    int64_t x_floats; // of a thread

    static void item(void *job, int64_t item, int slot) {
        ProductJob &self = *static_cast<ProductJob *>(job);
        const int64_t first = item * self.outputs;
        self.kernel.product(self.work, first, std::min(first + self.outputs, self.work.outputs),
                            self.x.data() + slot * self.x_floats);
    }
};

} // namespace

int32_t hfk_run_product(const hfk_product *work) {
    const bool is_known = work->dtype >= HFK_FLOAT32 && work->dtype <= HFK_BFLOAT16;
    if (!is_known || work->tokens < 0 || work->outputs < 0 || work->depth < 1) {
        return HFK_BAD_REQUEST;
    }
    const Kernel *kernel = find_kernel(work->path);
    if (kernel == nullptr) return HFK_NO_PATH;
    const bool is_small = work->outputs * work->depth < kThreadNumbers;
    const int64_t threads = is_small ? 1 : std::clamp(work->threads, 1, kMostThreads);
    const int64_t items = kItemsPerThread * threads;
    try {
        // A gap of a cache line keeps the slots of two threads apart.
        ProductJob job{*work, *kernel, std::max<int64_t>(1, (work->outputs + items - 1) / items), {},
                       work->tokens * product_stride(*work) + 16};
        job.x.resize(job.x_floats * threads);
        const int64_t count = (work->outputs + job.outputs - 1) / job.outputs;
        Pool::instance().run(count, static_cast<int>(threads), &ProductJob::item, &job);
    } catch (const std::bad_alloc &) {
        return HFK_NO_MEMORY;
    }
    return HFK_OK;
}
