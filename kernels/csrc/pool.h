// Worker threads for loops over independent items.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

// Where the process has GNU OpenMP, its threads do the work, which torch's operations use too. Else
// threads are started when a loop first wants them, wait between loops without turning the
// processor, and stay until the process ends. They inherit the affinity of the thread that started
// them.
class Pool {
  public:
    // Must not throw. `slot` is below the number of threads of the loop, and no two calls that run
    // at the same time have the same.
    using Work = void (*)(void *context, int64_t item, int slot);

    // The pool of this process; made anew in a child after fork, which has none of the threads.
    static Pool &instance();

    // Calls work(context, item, slot) for all items below `count`, on at most `threads` threads, of
    // which the caller is one; returns when all are done. Several threads may call this at once.
    // Throws std::bad_alloc. Where the system refuses threads, fewer do the work.
    void run(int64_t count, int threads, Work work, void *context);

    // As above, with job.work(item, slot).
    template <class Job> void run(int64_t count, int threads, Job &job) {
        const auto work = [](void *context, int64_t item, int slot) {
            static_cast<Job *>(context)->work(item, slot);
        };
        run(count, threads, work, &job);
    }

  private:
    struct Loop {
        Work work;
        void *context;
        int64_t count;
        std::atomic<int64_t> next{0};
        std::atomic<int> next_slot{0}; // on a team of OpenMP
        // These are guarded by the pool's mutex.
        int wanted = 0;
        int slots = 1;
        int active = 0;

        void turn(int slot);
    };

    static void take_turn(void *loop);
    void start_workers(int wanted);
    void serve();

    std::mutex mutex_;
    std::condition_variable work_ready_;
    std::condition_variable work_done_;
    std::vector<Loop *> loops_;
    int workers_ = 0;
};
