// ParisKV's scan with AVX-512 VBMI: tables of points lie in registers.
#pragma once

#include "avx512.h"

namespace {

// The scan where a token's sign has 8, 16 or more bytes and entries are below 8: points of two heads
// share a byte, and 64 tokens go together. Other tables go to the code for any processor.
struct NibbleScan {
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
        constexpr int tokens = 64 / Width; // in a vector
        alignas(64) static constexpr auto order = [] {
            struct {
                uint8_t at[64];
            } bytes{};
            for (int i = 0; i < 64; ++i) bytes.at[i] = i % tokens * Width + i / tokens;
            return bytes;
        }();
        const __m512i side_by_side = _mm512_load_si512(order.at);
        __m512i rows[Width], half[Width];
        for (int i = 0; i < Width; ++i) {
            const uint8_t *first = from + i * tokens * stride;
            __m512i x;
            if (stride == Width) {
                x = _mm512_loadu_si512(first);
            } else if constexpr (Width == 8) {
                const __m512i rows = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
                const __m512i at = _mm512_mullo_epi64(rows, _mm512_set1_epi64(stride));
                x = _mm512_i64gather_epi64(at, first, 1);
            } else {
                const auto part = [&](int t) {
                    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(first + t * stride));
                };
                x = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
                x = _mm512_inserti32x4(_mm512_inserti32x4(x, part(2), 2), part(3), 3);
            }
            rows[i] = _mm512_permutexvar_epi8(side_by_side, x);
        }
        if constexpr (Width == 16) {
            // Words of 4 tokens: a transposition of 16 x 16.
            for (int i = 0; i < 16; i += 2) {
                half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
                half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
            }
            for (int i = 0; i < 16; i += 4) {
                rows[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
                rows[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
                rows[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
                rows[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
            }
            lanes(rows, half, out, 4);
        } else {
            // Words of 8 tokens: 8 x 8.
            for (int i = 0; i < 8; i += 2) {
                half[i] = _mm512_unpacklo_epi64(rows[i], rows[i + 1]);
                half[i + 1] = _mm512_unpackhi_epi64(rows[i], rows[i + 1]);
            }
            for (int i = 0; i < 2; ++i) {
                const __m512i a = half[i], b = half[i + 2], c = half[i + 4], d = half[i + 6];
                const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x88);
                const __m512i ab2 = _mm512_shuffle_i32x4(a, b, 0xdd);
                const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x88);
                const __m512i cd2 = _mm512_shuffle_i32x4(c, d, 0xdd);
                out[i] = _mm512_shuffle_i32x4(ab, cd, 0x88);
                out[i + 4] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
                out[i + 2] = _mm512_shuffle_i32x4(ab2, cd2, 0x88);
                out[i + 6] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
            }
        }
    }

    // The 128-bit lanes of four groups of vectors, transposed.
    static void lanes(const __m512i *rows, __m512i *half, __m512i *out, int count) {
        for (int i = 0; i < count; ++i) {
            half[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
            half[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
            half[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
            half[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
        }
        for (int i = 0; i < count; ++i) {
            out[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
            out[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
            out[i + 4] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0x88);
            out[i + 12] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0xdd);
        }
    }

    // Entries of a table of 256 for 64 bytes.
    static __m512i look_up(__m512i bytes, const __m512i *table) {
        const __m512i low = _mm512_permutex2var_epi8(table[0], bytes, table[1]);
        const __m512i high = _mm512_permutex2var_epi8(table[2], bytes, table[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high);
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
                        __m512i table[4];
                        HFK_UNROLL for (int t = 0; t < 4; ++t) {
                            table[t] = _mm512_loadu_si512(from + (s + e) * 256 + 64 * t);
                        }
                        HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                            const __m512i entry = look_up(bytes[b][s + e], table);
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
                __m512i table[4];
                HFK_UNROLL for (int t = 0; t < 4; ++t) {
                    table[t] = _mm512_loadu_si512(from + s * 256 + 64 * t);
                }
                HFK_UNROLL for (int b = 0; b < Blocks; ++b) {
                    const __m512i entry = look_up(bytes[s][b], table);
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
