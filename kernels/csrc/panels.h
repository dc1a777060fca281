// Products of matrices, panel by panel. See rows.h on linkage.
//
// One factor of a product lies in a panel: element i of a vector belongs to its column i, and no sum
// goes across a vector. The other factor is read one number at a time, which is broadcast.
//
// `M` is what products are of: fp32 numbers, or bf16 as it is given, where `I` multiplies it. Sums are
// fp32. A slot is four bytes of the work space: a number of fp32, or two neighbours in bf16.
#pragma once

#include "tiles.h"
#include "workspace.h"

namespace {

// Lines of rows to come, which are asked for some at a time: all at once they would fill the queue of
// misses and stop the arithmetic.
class RowLines {
  public:
    // The lines of `count` rows, from byte `first` up to `bytes`, are shared by so many `calls`.
    RowLines(const char *const *rows, int64_t count, int64_t first, int64_t bytes, int64_t calls)
        : row_(rows), end_(bytes > first ? rows + count : rows), first_(first), bytes_(bytes),
          byte_(first), at_once_(((bytes + kLine - 1) / kLine * count + calls - 1) / calls) {}

    void ask() {
        for (int64_t i = 0; i < at_once_ && row_ != end_; ++i) {
            ask_for(*row_ + byte_);
            byte_ += kLine;
            if (byte_ >= bytes_) byte_ = first_, ++row_;
        }
    }

  private:
    const char *const *row_, *const *end_;
    int64_t first_, bytes_, byte_, at_once_;
};

// A panel has two vectors in each row. `M` is the type that is multiplied.
template <class I, class M> struct Panel {
    typedef typename I::V V;
    static constexpr int64_t kInSlot = sizeof(float) / sizeof(M);
    static constexpr int64_t kColumns = 2 * I::lanes;
    // Rows of products that are worked on at once: the sums of kRows fill the registers.
    static constexpr int kRows = I::few_registers ? 4 : 8, kFew = kHeadTile;
    static_assert(kRows <= 2 * kFew, "Rows behind the last one have room in a tile.");
    // Lines are asked for when so many products of each row and column were summed.
    static constexpr int64_t kStretch = 8;

    // How often a product of so many rows asks for lines.
    static int64_t calls(int64_t rows, int64_t depth) {
        return (rows + kRows - 1) / kRows * ((depth + kStretch - 1) / kStretch);
    }

    // A key or query as products read it, in whole slots: an odd number of halves has a 0 behind it.
    template <class T> static void put_row(const T *from, int64_t count, float *to) {
        if constexpr (kInSlot == 1) {
            int64_t i = 0;
            for (; i + I::lanes <= count; i += I::lanes) I::store(to + i, I::load(from + i));
            if (i < count) I::store(to + i, I::load_some(from + i, static_cast<int>(count - i)));
        } else {
            to[(count - 1) / 2] = 0.0f;
            __builtin_memcpy(to, from, count * sizeof(T));
        }
    }

    // Loads a vector of slots: all of its numbers, or the first `count` and zeros.
    template <class T> static V load_slots(const T *from) {
        if constexpr (kInSlot == 1) return I::load(from);
        else return I::load_halves(from);
    }

    template <class T> static V load_slots(const T *from, int64_t count) {
        if constexpr (kInSlot == 1) return I::load_some(from, static_cast<int>(count));
        else return I::load_halves(from, count);
    }

    // Puts numbers of two rows into slots, those of the first one into lower halves. A row that is
    // null has zeros.
    static void put_pairs(const M *first, const M *second, int64_t count, float *to) {
        constexpr int64_t kStep = kInSlot * I::lanes;
        const auto load = [](const M *row, int64_t i, int64_t left) {
            if (row == nullptr) return I::set1(0.0f);
            return left >= kStep ? load_slots(row + i) : load_slots(row + i, left);
        };
        for (int64_t i = 0; i < count; i += kStep) {
            V low = load(first, i, count - i), high = load(second, i, count - i);
            I::zip_halves(low, high);
            I::store(to + i, low);
            I::store(to + i + I::lanes, high);
        }
    }

    // Rounds weights [count] to bf16, in place; zeros follow to the end of a vector.
    static void pair_neighbours(float *weights, int64_t count) {
        for (int64_t j = 0; j < count; j += 2 * I::lanes) {
            const V first = I::load(weights + j), second = I::load(weights + j + I::lanes);
            I::store(weights + j / 2, I::rounded(first, second));
        }
    }

    // Writes the product of a [rows, depth] and b [depth, kColumns] to c, or adds it. There are
    // `a_row` and `c_row` floats from one row to the next; the last tile goes on behind the rows.
    // Meanwhile lines are asked for. Within its callers the compiler keeps the addresses of rows in
    // memory, and not in registers: so it is never inlined.
    template <bool Adds>
    __attribute__((noinline)) static void multiply(const float *a, int64_t a_row, const float *b,
                                                   int64_t depth, float *c, int64_t c_row,
                                                   int64_t rows, RowLines &lines) {
        RowLines ahead = lines;
        int64_t row = 0;
        for (; row + kFew < rows; row += kRows) {
            multiply_rows<Adds, kRows>(a + row * a_row, a_row, b, depth, c + row * c_row, c_row,
                                       ahead);
        }
        if (row < rows) {
            multiply_rows<Adds, kFew>(a + row * a_row, a_row, b, depth, c + row * c_row, c_row,
                                      ahead);
        }
        lines = ahead;
    }

  private:
    template <bool Adds, int R>
    static void multiply_rows(const float *a, int64_t a_row, const float *b, int64_t depth, float *c,
                              int64_t c_row, RowLines &lines) {
        V sums[R][2];
        HFK_UNROLL for (int r = 0; r < R; ++r) {
            HFK_UNROLL for (int v = 0; v < 2; ++v) {
                sums[r][v] = Adds ? I::load(c + r * c_row + v * I::lanes) : I::set1(0.0f);
            }
        }
        for (int64_t k = 0; k < depth;) {
            lines.ask();
            const int64_t end = k + kStretch < depth ? k + kStretch : depth;
            for (; k < end; ++k, b += kColumns) {
                const V first = I::load(b), second = I::load(b + I::lanes);
                HFK_UNROLL for (int r = 0; r < R; ++r) {
                    const V factor = I::set1(a[r * a_row + k]);
                    sums[r][0] = multiply_add(factor, first, sums[r][0]);
                    sums[r][1] = multiply_add(factor, second, sums[r][1]);
                }
            }
        }
        HFK_UNROLL for (int r = 0; r < R; ++r) {
            HFK_UNROLL for (int v = 0; v < 2; ++v) I::store(c + r * c_row + v * I::lanes, sums[r][v]);
        }
    }

    static V multiply_add(V a, V b, V sum) {
        if constexpr (kInSlot == 1) {
            return I::fma(a, b, sum);
        } else {
            return I::multiply_add(I::as_pair(a), I::as_pair(b), sum);
        }
    }
};

} // namespace
