#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <thread>

namespace {

// Never deleted: workers wait in it until the process ends. A child leaves its parent's behind,
// because the mutex may have been locked by a thread that the child does not have.
std::atomic<Pool *> current{nullptr};

// Starts a function on a team of threads and waits for it: libgomp's.
using StartTeam = void (*)(void (*)(void *), void *, unsigned, unsigned);

// GNU OpenMP, where the process has it, as with torch: its threads stay awake for a while after each
// operation of torch, and would take the processors from others.
StartTeam find_team() {
    void *library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<StartTeam>(dlsym(library, "GOMP_parallel"));
}

// libgomp has none of its threads in a child, and does not know.
std::atomic<bool> forked{false};

void forget_pool() {
    current.store(nullptr);
    forked.store(true);
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_pool);

} // namespace

Pool &Pool::instance() {
    Pool *pool = current.load();
    if (pool == nullptr) {
        Pool *made = new Pool;
        if (current.compare_exchange_strong(pool, made)) {
            pool = made;
        } else {
            delete made;
        }
    }
    return *pool;
}

void Pool::Loop::turn(int slot) {
    for (int64_t item = next++; item < count; item = next++) work(context, item, slot);
}

void Pool::take_turn(void *context) {
    Loop &loop = *static_cast<Loop *>(context);
    loop.turn(loop.next_slot++);
}

void Pool::run(int64_t count, int threads, Work work, void *context) {
    Loop loop;
    loop.work = work;
    loop.context = context;
    loop.count = count;
    const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
    if (helpers <= 0) {
        loop.turn(0);
        return;
    }
    static const StartTeam start_team = find_team();
    if (start_team != nullptr && !forked.load()) {
        // torch's number is kept for fewer items too: a team of another size would be made again.
        start_team(&Pool::take_turn, &loop, static_cast<unsigned>(threads), 0);
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        loops_.push_back(&loop);
        loop.wanted = helpers;
        start_workers(helpers);
    }
    work_ready_.notify_all();
    loop.turn(0);
    std::unique_lock<std::mutex> lock(mutex_);
    loops_.erase(std::find(loops_.begin(), loops_.end(), &loop));
    work_done_.wait(lock, [&loop] { return loop.active == 0; });
}

void Pool::start_workers(int wanted) {
    while (workers_ < wanted) {
        try {
            std::thread(&Pool::serve, this).detach();
        } catch (const std::system_error &) {
            return;
        }
        ++workers_;
    }
}

void Pool::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        const auto found = std::find_if(loops_.begin(), loops_.end(),
                                        [](const Loop *loop) { return loop->wanted > 0; });
        if (found == loops_.end()) {
            work_ready_.wait(lock);
            continue;
        }
        Loop &loop = **found;
        --loop.wanted;
        ++loop.active;
        const int slot = loop.slots++;
        lock.unlock();
        loop.turn(slot);
        lock.lock();
        if (--loop.active == 0) work_done_.notify_all();
    }
}
