// Where rows lie, and which to ask for before they are needed.
//
// Everything here has internal linkage: the translation units are compiled for different
// processors, and the linker must not hand one unit's copy of a function to another.
#pragma once

#include "kernel.h"

namespace {

struct Half {
    uint16_t bits;
};

struct Bf16 {
    uint16_t bits;
};

struct Int8 {
    int8_t number;
};

// Whether a pair of vectors holds elements of even number and elements of odd number, which bf16 is
// split into more quickly than into halves; else it holds them in their order. Queries and sums of
// values are kept in the order of pairs.
template <class T> constexpr bool splits = false;
template <> constexpr bool splits<Bf16> = true;

// Rows of a block: all are scored, then softmaxed, then summed. Many, because asking for the first
// lines of many rows at once lets the processor translate their addresses in parallel.
constexpr int kBlock = 64;

constexpr int64_t kLine = 64;

// The id of no token.
constexpr int32_t kHole = -1;

// Ask for the cache line at `address`; it may lie anywhere. Goes to the second-level cache:
// measured, that keeps about 1.6 times more lines in flight than asking for the first level.
inline void ask_for(const char *address) { __builtin_prefetch(address, 0, 2); }

// Rows that are worked on, and the rows to ask for meanwhile.
struct Block {
    int count = 0; // of rows; 0 at the end of the stream
    const char *keys[kBlock];
    const char *values[kBlock];
    int64_t places[kBlock]; // among the ids
    // Rows of the next block, one for each of this; the row itself where there is none.
    const char *keys_ahead[kBlock];
    const char *values_ahead[kBlock];
};

// Where the rows of a page's head lie, in bytes: each of them, and what belongs to it, its value, or
// the scales of its codes.
struct RowLayout {
    int64_t row_bytes;
    int64_t side_start; // of the first row, from the head on
    int64_t side_bytes; // from one row's to the next
    int64_t head_bytes;
};

// Rows of plain numbers lie like this: keys and values side by side.
inline RowLayout layout_of(const hfk_request &request, int64_t element_bytes) {
    const int64_t bytes = request.row_dim * element_bytes;
    return {bytes, request.value_start * element_bytes, bytes, request.page_len * bytes};
}

// Addresses of the rows that a span names, holes left out, block by block.
//
// Ids are random, so no hardware prefetcher foresees them. When a block begins, the first line of
// every row of the next block is asked for. The kernels ask for the other lines: for a line of a row
// to come whenever they read the same line of a present row. All at once they would fill the queue
// of misses and stop the arithmetic.
//
// An id that leads to no row is left out too, and noted.
class RowStream {
  public:
    RowStream(const hfk_request &request, const Span &span, int64_t element_bytes, bool values)
        : RowStream(request, span, layout_of(request, element_bytes),
                    values ? request.row_dim * element_bytes : request.key_dim * element_bytes) {}

    // Asks for `bytes` of the first rows.
    RowStream(const hfk_request &request, const Span &span, const RowLayout &layout, int64_t bytes)
        : layout_(layout), page_len_(request.page_len) {
        shift_ = -1;
        if ((page_len_ & (page_len_ - 1)) == 0) {
            shift_ = 0;
            while ((int64_t{1} << shift_) < page_len_) ++shift_;
        }
        const int64_t kv_head = span.id_head / (request.id_heads / request.kv_heads);
        head_bytes_ = kv_head * layout.head_bytes;
        table_ = request.table + span.batch * request.max_pages;
        pages_ = request.pages;
        page_count_ = static_cast<uint32_t>(request.page_count);
        tokens_ = static_cast<uint32_t>(request.tokens);
        ids_ = span.ids;
        next_ = span.first;
        last_ = span.last;
        resolve();
        for (int i = 0; i < count_; ++i) {
            for (int64_t byte = 0; byte < bytes; byte += kLine) ask_for(rows_[i] + byte);
        }
    }

    // Whether all ids so far were -1 or led to rows.
    bool is_whole() const { return whole_; }

    // The next rows, at most kBlock.
    void take(Block &block) {
        block.count = count_;
        for (int i = 0; i < count_; ++i) {
            block.keys[i] = rows_[i];
            block.values[i] = sides_[i];
            block.places[i] = places_[i];
        }
        resolve();
        for (int i = 0; i < block.count; ++i) {
            block.keys_ahead[i] = i < count_ ? rows_[i] : block.keys[i];
            block.values_ahead[i] = i < count_ ? sides_[i] : block.values[i];
            ask_for(block.keys_ahead[i]);
        }
    }

  private:
    // Look up ids until a block is full, or all are.
    void resolve() {
        count_ = 0;
        while (count_ < kBlock && next_ < last_) {
            const int32_t id = ids_[next_++];
            // One comparison finds both ends: as unsigned, negative numbers exceed all counts.
            if (static_cast<uint32_t>(id) >= tokens_) {
                if (id != kHole) whole_ = false;
                continue;
            }
            const int64_t page = shift_ >= 0 ? id >> shift_ : id / page_len_;
            const int64_t slot = shift_ >= 0 ? id & (page_len_ - 1) : id % page_len_;
            const int32_t number = table_[page];
            if (static_cast<uint32_t>(number) >= page_count_) {
                whole_ = false;
                continue;
            }
            const char *head = reinterpret_cast<const char *>(pages_[number] + head_bytes_);
            rows_[count_] = head + slot * layout_.row_bytes;
            sides_[count_] = head + layout_.side_start + slot * layout_.side_bytes;
            places_[count_] = next_ - 1;
            ++count_;
        }
    }

    const int32_t *ids_;
    const int32_t *table_;
    const int64_t *pages_;
    int64_t next_, last_;
    const RowLayout layout_;
    int64_t head_bytes_, page_len_;
    uint32_t page_count_, tokens_;
    int shift_;
    bool whole_ = true;
    // The block to come.
    int count_;
    const char *rows_[kBlock], *sides_[kBlock];
    int64_t places_[kBlock];
};

// Rows that lie side by side, those that a mask excludes left out, block by block.
class DenseStream {
  public:
    // `length` rows of keys and of values; `valid` has a byte for each, null where all are valid.
    DenseStream(const char *keys, int64_t key_bytes, const char *values, int64_t value_bytes,
                int64_t length, const uint8_t *valid)
        : keys_(keys), values_(values), valid_(valid), key_bytes_(key_bytes),
          value_bytes_(value_bytes), length_(length) {}

    void take(Block &block) {
        block.count = 0;
        while (block.count < kBlock && next_ < length_) {
            const int64_t row = next_++;
            if (valid_ != nullptr && !valid_[row]) continue;
            const int64_t ahead = row + kBlock < length_ ? row + kBlock : row;
            block.keys[block.count] = keys_ + row * key_bytes_;
            block.values[block.count] = values_ + row * value_bytes_;
            block.places[block.count] = row;
            block.keys_ahead[block.count] = keys_ + ahead * key_bytes_;
            block.values_ahead[block.count] = values_ + ahead * value_bytes_;
            ++block.count;
        }
    }

  private:
    const char *keys_, *values_;
    const uint8_t *valid_;
    int64_t key_bytes_, value_bytes_, length_;
    int64_t next_ = 0;
};

} // namespace
