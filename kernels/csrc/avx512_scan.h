// ParisKV's scan with AVX-512: points of two heads share a byte of a table that is looked up.
#pragma once

#include "avx512.h"

namespace {

// Looks up 64 bytes in a table of 256, by a shuffle for each 16 entries.
class ShuffledTable {
  public:
    explicit ShuffledTable(const char *from) : from_(from) {}

    __m512i at(__m512i bytes) const {
        const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
        __mmask64 bit[4]; // the upper four of each byte
        HFK_UNROLL for (int i = 0; i < 4; ++i) {
            bit[i] = _mm512_movepi8_mask(_mm512_slli_epi16(bytes, 3 - i));
        }
        __m512i parts[8];
        HFK_UNROLL for (int i = 0; i < 8; ++i) {
            const __m512i even = _mm512_shuffle_epi8(sixteen(2 * i), low);
            parts[i] = _mm512_mask_shuffle_epi8(even, bit[0], sixteen(2 * i + 1), low);
        }
        HFK_UNROLL for (int step = 1; step < 4; ++step) {
            HFK_UNROLL for (int i = 0; i < 8 >> step; ++i) {
                parts[i] = _mm512_mask_blend_epi8(bit[step], parts[2 * i], parts[2 * i + 1]);
            }
        }
        return parts[0];
    }

  private:
    // In all lanes.
    __m512i sixteen(int part) const {
        return _mm512_broadcast_i32x4(
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(from_ + 16 * part)));
    }

    const char *from_;
};

// The scan where a token's sign has 8, 16 or more bytes and entries are below 8: points of two heads
// share a byte, and 64 tokens go together. Other tables go to the code for any processor.
template <class Table> struct NibbleScan {
    static constexpr int kBlocks = 4;       // of 64 tokens, at once
    static constexpr int64_t kMost = 128;   // bytes of a token: 1,024 coordinates

    static bool fits(const PointTables &tables) {
        return tables.most < 8 && (tables.bytes == 8 || tables.bytes >= 16);
    }

    static int64_t pairs(const PointTables &tables) { return (tables.heads + 1) / 2; }

    static int64_t packed_bytes(const PointTables &tables) {
        return fits(tables) ? pairs(tables) * tables.bytes * 256 : ByteScan::packed_bytes(tables);
    }

    // To [pairs, bytes, 256]: the even head in the low half.
    static void pack(const PointTables &tables) {
        if (!fits(tables)) return ByteScan::pack(tables);
        const int64_t entries = tables.bytes * 256;
        for (int64_t p = 0; p < pairs(tables); ++p) {
            const uint8_t *even = tables.points + 2 * p * entries;
            const bool has_odd = 2 * p + 1 < tables.heads;
            for (int64_t e = 0; e < entries; e += 64) {
                __m512i both = _mm512_loadu_si512(even + e);
                if (has_odd) {
                    const __m512i odd = _mm512_loadu_si512(even + entries + e);
                    both = _mm512_or_si512(both, _mm512_slli_epi16(odd, 4));
                }
                _mm512_storeu_si512(tables.packed + p * entries + e, both);
            }
        }
    }

    // Bytes of 64 tokens, subspace by subspace. The first `Width` of `stride` bytes, 8 or 16.
    template <int Width>
    static void transpose(const uint8_t *from, int64_t stride, __m512i *out) {
        constexpr int tokens = 16 / Width; // in a lane of a vector
        const auto lane = [&](int64_t t) {
            const auto *first = reinterpret_cast<const __m128i *>(from + t * stride);
            if constexpr (Width == 16) return _mm_loadu_si128(first);
            const auto *second = reinterpret_cast<const __m128i *>(from + (t + 1) * stride);
            return _mm_unpacklo_epi64(_mm_loadl_epi64(first), _mm_loadl_epi64(second));
        };
        // Each of the four lanes has 16 tokens, spread over all vectors.
        HFK_UNROLL for (int i = 0; i < Width; ++i) {
            const int64_t t = tokens * i;
            __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(lane(t)), lane(t + 16), 1);
            out[i] = _mm512_inserti32x4(_mm512_inserti32x4(x, lane(t + 32), 2), lane(t + 48), 3);
        }
        // A round moves the highest bit of a byte's place to the lowest of its vector's number, and
        // that number's highest bit to the place: after four rounds they are exchanged.
        HFK_UNROLL for (int round = 0; round < 4; ++round) {
            __m512i next[Width];
            HFK_UNROLL for (int i = 0; i < Width / 2; ++i) {
                next[2 * i] = _mm512_unpacklo_epi8(out[i], out[i + Width / 2]);
                next[2 * i + 1] = _mm512_unpackhi_epi8(out[i], out[i + Width / 2]);
            }
            HFK_UNROLL for (int i = 0; i < Width; ++i) out[i] = next[i];
        }
    }

    // Sums of `Blocks` blocks of 64 tokens from `token` on.
    template <int Width, int Blocks>
    static void add_up(const PointTables &tables, const uint8_t *token, __m512i *best) {
        const __m512i low_half = _mm512_set1_epi8(15);
        __m512i bytes[Blocks][Width];
        for (int b = 0; b < Blocks; ++b) best[b] = _mm512_setzero_si512();
        for (int64_t p = 0; p < pairs(tables); ++p) {
            // One has the sums of both heads modulo 256, the other those of the odd head.
            __m512i both[Blocks], odd[Blocks];
            for (int b = 0; b < Blocks; ++b) both[b] = odd[b] = _mm512_setzero_si512();
            for (int64_t part = 0; part < tables.bytes; part += Width) {
                if (p == 0 || tables.bytes > Width) {
                    for (int b = 0; b < Blocks; ++b) {
                        transpose<Width>(token + 64 * b * tables.bytes + part, tables.bytes,
                                         bytes[b]);
                    }
                }
                const char *from = tables.packed + (p * tables.bytes + part) * 256;
                for (int s = 0; s < Width; s += 2) {
                    __m512i sum[Blocks];
                    // Two entries below 8 stay below 16.
                    HFK_UNROLL for (int e = 0; e < 2; ++e) {
                        const Table table(from + (s + e) * 256);
                        HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                            const __m512i entry = table.at(bytes[b][s + e]);
                            sum[b] = e == 0 ? entry : _mm512_add_epi8(sum[b], entry);
                        }
                    }
                    HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                        both[b] = _mm512_add_epi8(both[b], sum[b]);
                        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(sum[b], 4), low_half);
                        odd[b] = _mm512_add_epi8(odd[b], high);
                    }
                }
            }
            take_best<Blocks>(both, odd, best);
        }
    }

    // The larger of both heads' sums, where they exceed the best.
    template <int Blocks>
    static void take_best(const __m512i *both, const __m512i *odd, __m512i *best) {
        const __m512i low_half = _mm512_set1_epi8(15);
        for (int b = 0; b < Blocks; ++b) {
            const __m512i sixteen_odd = _mm512_andnot_si512(low_half, _mm512_slli_epi16(odd[b], 4));
            const __m512i even = _mm512_sub_epi8(both[b], sixteen_odd);
            best[b] = _mm512_max_epu8(best[b], _mm512_max_epu8(even, odd[b]));
        }
    }

    // The same for any number of bytes, at least 8, which are too many to lie in registers.
    template <int Blocks>
    static void add_up_many(const PointTables &tables, const uint8_t *token, __m512i *best) {
        const __m512i low_half = _mm512_set1_epi8(15);
        __m512i bytes[kMost][Blocks];
        for (int b = 0; b < Blocks; ++b) {
            best[b] = _mm512_setzero_si512();
            for (int64_t part = 0; part < tables.bytes; part += 8) {
                // The last eight overlap those before them.
                const int64_t start = std::min(part, tables.bytes - 8);
                __m512i eight[8];
                transpose<8>(token + 64 * b * tables.bytes + start, tables.bytes, eight);
                for (int s = 0; s < 8; ++s) bytes[start + s][b] = eight[s];
            }
        }
        for (int64_t p = 0; p < pairs(tables); ++p) {
            __m512i both[Blocks], odd[Blocks];
            for (int b = 0; b < Blocks; ++b) both[b] = odd[b] = _mm512_setzero_si512();
            const char *from = tables.packed + p * tables.bytes * 256;
            for (int64_t s = 0; s < tables.bytes; ++s) {
                const Table table(from + s * 256);
                HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                    const __m512i entry = table.at(bytes[s][b]);
                    both[b] = _mm512_add_epi8(both[b], entry);
                    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(entry, 4), low_half);
                    odd[b] = _mm512_add_epi8(odd[b], high);
                }
            }
            take_best<Blocks>(both, odd, best);
        }
    }

    // `Width`: bytes of a token that are taken at a time; 0 for all, whatever their number.
    template <int Width, int Blocks>
    static void add_up_any(const PointTables &tables, const uint8_t *token, __m512i *best) {
        if constexpr (Width == 0) {
            add_up_many<Blocks>(tables, token, best);
        } else {
            add_up<Width, Blocks>(tables, token, best);
        }
    }

    template <int Width>
    static void scan_blocks(const PointTables &tables, const uint8_t *sign, const uint8_t *valid,
                            int64_t first, int64_t last, uint8_t *scores) {
        const __m512i one = _mm512_set1_epi8(1);
        const auto finish = [&](__m512i sums, int64_t i, __mmask64 held) {
            const __m512i marks = _mm512_maskz_loadu_epi8(held, valid + i);
            const __mmask64 taken = _mm512_test_epi8_mask(marks, marks);
            _mm512_mask_storeu_epi8(scores + i, held, _mm512_maskz_add_epi8(taken, sums, one));
        };
        int64_t i = first;
        __m512i best[kBlocks];
        for (; i + 64 * kBlocks <= last; i += 64 * kBlocks) {
            add_up_any<Width, kBlocks>(tables, sign + i * tables.bytes, best);
            for (int b = 0; b < kBlocks; ++b) finish(best[b], i + 64 * b, ~__mmask64{0});
        }
        for (; i < last; i += 64) {
            const int64_t count = last - i < 64 ? last - i : 64;
            const uint8_t *token = sign + i * tables.bytes;
            uint8_t copy[64 * (Width == 0 ? kMost : 32)];
            if (count < 64) {
                __builtin_memcpy(copy, token, count * tables.bytes);
                __builtin_memset(copy + count * tables.bytes, 0, (64 - count) * tables.bytes);
                token = copy;
            }
            add_up_any<Width, 1>(tables, token, best);
            finish(best[0], i, count < 64 ? (__mmask64{1} << count) - 1 : ~__mmask64{0});
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
