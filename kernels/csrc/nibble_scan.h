// ParisKV's scan with vectors of bytes on x86: points of two heads share a byte of a table.
#pragma once

#include <immintrin.h>

#include "paris_kernel.h"

namespace {

// The scan where a token's sign has 8, 16 or more bytes and entries are below 8: points of two heads
// share a byte, and as many tokens go together as a vector has bytes. Other tables go to the code for
// any processor. `B` has the vectors, `Table` looks bytes up in a table of 256.
template <class B, class Table> struct NibbleScan {
    typedef typename B::V V;
    static constexpr int kBytes = sizeof(V); // tokens of a block
    static constexpr int kBlocks = 4;        // at once
    static constexpr int64_t kMost = 128;    // bytes of a token: 1,024 coordinates

    static bool fits(const PointTables &tables) {
        return tables.most < 8 && (tables.bytes == 8 || tables.bytes >= 16);
    }

    static int64_t pairs(const PointTables &tables) { return (tables.heads + 1) / 2; }

    static int64_t packed_bytes(const PointTables &tables) {
        return fits(tables) ? pairs(tables) * tables.bytes * 256 : ByteScan::packed_bytes(tables);
    }

    // Tables become [pairs, bytes, 256]; the even head is in the low half of an entry.
    static void pack(const PointTables &tables) {
        if (!fits(tables)) return ByteScan::pack(tables);
        const int64_t entries = tables.bytes * 256;
        for (int64_t p = 0; p < pairs(tables); ++p) {
            const uint8_t *even = tables.points + 2 * p * entries;
            const bool has_odd = 2 * p + 1 < tables.heads;
            for (int64_t e = 0; e < entries; e += kBytes) {
                V both = B::load(even + e);
                if (has_odd) both = B::add(both, B::raise(B::load(even + entries + e)));
                B::store(tables.packed + p * entries + e, both);
            }
        }
    }

    // Bytes of a block, subspace by subspace. The first `Width` of `stride` bytes, 8 or 16.
    template <int Width> static void transpose(const uint8_t *from, int64_t stride, V *out) {
        const auto part = [&](int64_t t) {
            const auto *first = reinterpret_cast<const __m128i *>(from + t * stride);
            if constexpr (Width == 16) return _mm_loadu_si128(first);
            const auto *second = reinterpret_cast<const __m128i *>(from + (t + 1) * stride);
            return _mm_unpacklo_epi64(_mm_loadl_epi64(first), _mm_loadl_epi64(second));
        };
        // Each 128-bit lane has 16 tokens, spread over all vectors.
        HFK_UNROLL for (int i = 0; i < Width; ++i) {
            out[i] = B::lanes([&](int lane) { return part(16 * lane + 16 / Width * i); });
        }
        // A round moves the highest bit of a byte's place to the lowest of its vector's number, and
        // that number's highest bit to the place: after four rounds they are exchanged.
        HFK_UNROLL for (int round = 0; round < 4; ++round) {
            V next[Width];
            HFK_UNROLL for (int i = 0; i < Width / 2; ++i) {
                next[2 * i] = B::interleave_low(out[i], out[i + Width / 2]);
                next[2 * i + 1] = B::interleave_high(out[i], out[i + Width / 2]);
            }
            HFK_UNROLL for (int i = 0; i < Width; ++i) out[i] = next[i];
        }
    }

    // Sums of `Blocks` blocks from `token` on.
    template <int Width, int Blocks>
    static void add_up(const PointTables &tables, const uint8_t *token, V *best) {
        V bytes[Blocks][Width];
        for (int b = 0; b < Blocks; ++b) best[b] = B::zero();
        for (int64_t p = 0; p < pairs(tables); ++p) {
            // One has the sums of both heads modulo 256, the other those of the odd head.
            V both[Blocks], odd[Blocks];
            for (int b = 0; b < Blocks; ++b) both[b] = odd[b] = B::zero();
            for (int64_t part = 0; part < tables.bytes; part += Width) {
                if (p == 0 || tables.bytes > Width) {
                    for (int b = 0; b < Blocks; ++b) {
                        transpose<Width>(token + kBytes * b * tables.bytes + part, tables.bytes,
                                         bytes[b]);
                    }
                }
                const char *from = tables.packed + (p * tables.bytes + part) * 256;
                for (int s = 0; s < Width; s += 2) {
                    V sum[Blocks];
                    // Two entries below 8 stay below 16.
                    HFK_UNROLL for (int e = 0; e < 2; ++e) {
                        const Table table(from + (s + e) * 256);
                        HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                            const V entry = table.at(bytes[b][s + e]);
                            sum[b] = e == 0 ? entry : B::add(sum[b], entry);
                        }
                    }
                    HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                        both[b] = B::add(both[b], sum[b]);
                        odd[b] = B::add(odd[b], B::lower(sum[b]));
                    }
                }
            }
            take_best<Blocks>(both, odd, tables.drops + 2 * p, best);
        }
    }

    // A head's sum loses its drop, down to 0; the best becomes the larger of itself and both sums.
    template <int Blocks>
    static void take_best(const V *both, const V *odd, const uint8_t *drops, V *best) {
        for (int b = 0; b < Blocks; ++b) {
            const V even = B::less(B::sub(both[b], B::raise(odd[b])), drops[0]);
            best[b] = B::max(best[b], B::max(even, B::less(odd[b], drops[1])));
        }
    }

    // The same for any number of bytes, at least 8, which are too many to lie in registers.
    template <int Blocks>
    static void add_up_many(const PointTables &tables, const uint8_t *token, V *best) {
        V bytes[kMost][Blocks];
        for (int b = 0; b < Blocks; ++b) {
            best[b] = B::zero();
            for (int64_t part = 0; part < tables.bytes; part += 8) {
                // The last eight overlap those before them.
                const int64_t start = std::min(part, tables.bytes - 8);
                V eight[8];
                transpose<8>(token + kBytes * b * tables.bytes + start, tables.bytes, eight);
                for (int s = 0; s < 8; ++s) bytes[start + s][b] = eight[s];
            }
        }
        for (int64_t p = 0; p < pairs(tables); ++p) {
            V both[Blocks], odd[Blocks];
            for (int b = 0; b < Blocks; ++b) both[b] = odd[b] = B::zero();
            const char *from = tables.packed + p * tables.bytes * 256;
            for (int64_t s = 0; s < tables.bytes; ++s) {
                const Table table(from + s * 256);
                HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                    const V entry = table.at(bytes[s][b]);
                    both[b] = B::add(both[b], entry);
                    odd[b] = B::add(odd[b], B::lower(entry));
                }
            }
            take_best<Blocks>(both, odd, tables.drops + 2 * p, best);
        }
    }

    // `Width`: bytes of a token that are taken at a time; 0 for all, whatever their number.
    template <int Width, int Blocks>
    static void add_up_any(const PointTables &tables, const uint8_t *token, V *best) {
        if constexpr (Width == 0) {
            add_up_many<Blocks>(tables, token, best);
        } else {
            add_up<Width, Blocks>(tables, token, best);
        }
    }

    template <int Width>
    static void scan_blocks(const PointTables &tables, const uint8_t *sign, const uint8_t *valid,
                            int64_t first, int64_t last, uint8_t *scores) {
        int64_t i = first;
        V best[kBlocks];
        for (; i + kBytes * kBlocks <= last; i += kBytes * kBlocks) {
            add_up_any<Width, kBlocks>(tables, sign + i * tables.bytes, best);
            for (int b = 0; b < kBlocks; ++b) {
                const int64_t at = i + kBytes * b;
                B::store(scores + at, B::increase(best[b], B::load(valid + at)));
            }
        }
        for (; i < last; i += kBytes) {
            const size_t count = std::min<int64_t>(last - i, kBytes);
            uint8_t tokens[kBytes * (Width == 0 ? kMost : 32)] = {}, marks[kBytes] = {};
            __builtin_memcpy(tokens, sign + i * tables.bytes, count * tables.bytes);
            __builtin_memcpy(marks, valid + i, count);
            add_up_any<Width, 1>(tables, tokens, best);
            B::store(marks, B::increase(best[0], B::load(marks)));
            __builtin_memcpy(scores + i, marks, count);
        }
    }

    static void scan(const PointTables &tables, const uint8_t *sign, const uint8_t *valid,
                     int64_t first, int64_t last, uint8_t *scores) {
        auto *run = !fits(tables)                                  ? ByteScan::scan
                    : tables.bytes == 8                            ? scan_blocks<8>
                    : tables.bytes == 16 || tables.bytes == 32     ? scan_blocks<16>
                                                                   : scan_blocks<0>;
        run(tables, sign, valid, first, last, scores);
    }
};

} // namespace
