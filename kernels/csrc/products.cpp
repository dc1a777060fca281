// Products of a weight and few tokens, on several threads.
#include "job.h"

namespace {

// Further threads pay from so many numbers of a weight on.
constexpr int64_t kThreadNumbers = int64_t{1} << 15;

struct ProductJob {
    const hfk_product &product;
    const Kernel &kernel;
    int64_t outputs; // of an item
    std::vector<float> x;
    int64_t x_floats; // of a thread

    void work(int64_t item, int slot) {
        kernel.product(product, item * outputs, std::min((item + 1) * outputs, product.outputs),
                       x.data() + slot * x_floats);
    }
};

} // namespace

int32_t hfk_run_product(const hfk_product *work) {
    const bool is_known = work->dtype >= HFK_FLOAT32 && work->dtype <= HFK_BFLOAT16;
    const bool is_good = is_known && work->tokens >= 0 && work->outputs >= 0 && work->depth >= 1;
    return serve(is_good, work->path, [work](const Kernel &kernel) {
        const bool is_small = work->outputs * work->depth < kThreadNumbers;
        const int threads = is_small ? 1 : std::clamp(work->threads, 1, kMostThreads);
        const int64_t items = kItemsPerThread * threads;
        // A gap of a cache line keeps the slots of two threads apart.
        ProductJob job{*work, kernel, std::max<int64_t>(1, (work->outputs + items - 1) / items), {},
                       work->tokens * product_stride(*work) + 16};
        job.x.resize(job.x_floats * threads);
        Pool::instance().run((work->outputs + job.outputs - 1) / job.outputs, threads, job);
        return HFK_OK;
    });
}
