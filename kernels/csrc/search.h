// The searches of a step, as stages: what chooses the ids of each query.
#pragma once

#include <memory>

#include "kernel.h"

// A query of a selecting head.
struct Selection {
    int64_t batch;
    int64_t head;
    int64_t query;
};

// A search runs stage by stage; the chunks of a stage are independent of each other.
class Search {
  public:
    virtual ~Search() = default;

    virtual int stages() const = 0;

    // Whether a stage does its share for each chunk; one that doesn't is to be run as one chunk.
    virtual bool is_split(int stage) const = 0;

    // Work space of a selection, kept from stage to stage; begins at a multiple of 64.
    virtual int64_t bytes() const = 0;

    // The last stage writes the ids of the selection. `scratch` are floats of the thread. False where
    // a valid token's code is of no codeword.
    virtual bool run(int stage, const Selection &selection, char *work, float *scratch,
                     int64_t chunk, int64_t chunks, int32_t *ids) const = 0;
};

// The search of a step; null where its kind or its sizes are not what they must be.
std::unique_ptr<Search> make_search(const hfk_step &step, const Kernel &kernel);

// Those of each kind.
std::unique_ptr<Search> make_flat_search(const hfk_step &step, const Kernel &kernel);
std::unique_ptr<Search> make_proxy_search(const hfk_step &step, const Kernel &kernel);
std::unique_ptr<Search> make_codebook_search(const hfk_step &step, const Kernel &kernel);
std::unique_ptr<Search> make_paris_search(const hfk_step &step, const Kernel &kernel);
std::unique_ptr<Search> make_list_search(const hfk_step &step, const Kernel &kernel);

// Copies what the stages of ParisKV's search left in `work`.
void trace_paris(const Search &search, const Selection &selection, const char *work,
                 const hfk_paris_trace &trace);

// Places that kernels may write or read behind an array.
constexpr int64_t kSlack = 64;

// `count` of a row, so that the next row begins at a multiple of 64 elements.
inline int64_t row_stride(int64_t count) { return (count + 63) / 64 * 64; }

// Where a chunk of `count` elements begins, a multiple of 64; the last one ends with them.
inline int64_t boundary(int64_t count, int64_t chunk, int64_t chunks) {
    return chunk == chunks ? count : count * chunk / chunks / 64 * 64;
}

// Cuts arrays from one buffer; each begins at a multiple of 64 bytes.
class Cutter {
  public:
    template <class T> int64_t take(int64_t count) {
        const int64_t start = bytes_;
        bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return start;
    }

    int64_t bytes() const { return bytes_; }

  private:
    int64_t bytes_ = 0;
};

template <class T> T *at(char *work, int64_t offset) { return reinterpret_cast<T *>(work + offset); }
