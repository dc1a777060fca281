// 64-bit Arm: NEON is a part of every such processor, so nothing is asked at run time. Four floats.
#include <arm_neon.h>

#include "paris_kernel.h"

namespace {

struct Neon {
    typedef float32x4_t V;

    template <class T> static constexpr bool multiplies = false;
    static constexpr bool few_registers = false;
    static constexpr int lanes = 4;
    static constexpr int heads = 4;   // 16 sums, 8 halves of keys and a query in 32 registers
    static constexpr int columns = 4;

    static V set1(float x) { return vdupq_n_f32(x); }
    static V load(const float *from) { return vld1q_f32(from); }

    static V load(const Bf16 *from) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(&from->bits)), 16));
    }

    static V load(const Half *from) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
    }

    static V load(const Int8 *from) {
        uint32_t bytes;
        __builtin_memcpy(&bytes, from, sizeof bytes);
        const int16x8_t wide = vmovl_s8(vcreate_s8(bytes));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    }

    static void load_pair(const float *from, V &a, V &b) { a = load(from), b = load(from + lanes); }

    static void load_pair(const Half *from, V &a, V &b) {
        const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(&from->bits));
        a = vcvt_f32_f16(vget_low_f16(halves)), b = vcvt_high_f32_f16(halves);
    }

    static void load_pair(const Bf16 *from, V &a, V &b) {
        const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(&from->bits));
        a = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
        b = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
    }

    template <class T> static V load_some(const T *from, int count) {
        T all[lanes] = {};
        for (int i = 0; i < count; ++i) all[i] = from[i];
        return load(all);
    }

    static void store(float *to, V x) { vst1q_f32(to, x); }
    static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
    static V max(V a, V b) { return vmaxq_f32(a, b); }
    static V abs(V x) { return vabsq_f32(x); }
    static V copy_sign(V size, V sign) { return vbslq_f32(vdupq_n_u32(kSign), sign, size); }
    static V where_less(V a, V b, V yes, V no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }

    // Numbers of `lanes / 2` points of a grid [*, 2].
    static V pairs_at(const uint8_t *codes, const float *grid, int) {
        return vcombine_f32(vld1_f32(grid + 2 * codes[0]), vld1_f32(grid + 2 * codes[1]));
    }

    // Number i is x[i ^ H].
    template <int H> static V swapped(V x) {
        return H == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
    }

    // Numbers of a and b in turn: those of the lower halves, and of the upper ones.
    static void zip(V a, V b, V &low, V &high) { low = vzip1q_f32(a, b), high = vzip2q_f32(a, b); }

    // 2^n of the n in the low bits of `shifted`.
    static V power_of_two(V shifted) {
        const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
        return vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f800000u)));
    }

    static float largest(V x) { return vmaxvq_f32(x); }

    static void store_sums(float *to, V a, V b, V c, V d) {
        store(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
    }

    // Bit i says whether number i is at least `limit`.
    static uint32_t at_least16(const float *from, float limit) {
        const V level = set1(limit);
        uint32x4_t bit = {1, 2, 4, 8}, bits = vdupq_n_u32(0);
        HFK_UNROLL for (int i = 0; i < 16; i += lanes) {
            bits = vorrq_u32(bits, vandq_u32(vcgeq_f32(load(from + i), level), bit));
            bit = vshlq_n_u32(bit, lanes);
        }
        return vaddvq_u32(bits);
    }

    // Sums of neighbours gather eight bits in a byte, as they are all different.
    static uint64_t at_least64(const uint8_t *from, uint8_t limit) {
        const uint8x16_t level = vdupq_n_u8(limit);
        const uint8x16_t bit = vcombine_u8(vcreate_u8(kBits), vcreate_u8(kBits));
        const auto reached = [&level, &bit](const uint8_t *bytes) {
            return vandq_u8(vcgeq_u8(vld1q_u8(bytes), level), bit);
        };
        const uint8x16_t low = vpaddq_u8(reached(from), reached(from + 16));
        const uint8x16_t high = vpaddq_u8(reached(from + 32), reached(from + 48));
        const uint8x16_t all = vpaddq_u8(low, high);
        return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
    }

    static int64_t put_places(uint64_t chosen, int32_t base, int32_t *to) {
        return put_places_one_by_one(chosen, base, to);
    }

    // Eight coordinates: level times weight, with its sign. Levels are looked up byte by byte.
    static void decode(const uint8_t *magnitude, const uint8_t *sign, const float *weights,
                       const float *levels, V (&values)[2]) {
        const uint32_t word = magnitude[0] | magnitude[1] << 8 | magnitude[2] << 16;
        const uint8x16x2_t table = {{vreinterpretq_u8_f32(load(levels)),
                                     vreinterpretq_u8_f32(load(levels + lanes))}};
        const int32x4_t down = {0, -3, -6, -9}, to_top = {31, 30, 29, 28};
        HFK_UNROLL for (int half = 0; half < 2; ++half) {
            const uint32x4_t shifted = vshlq_u32(vdupq_n_u32(word >> 12 * half), down);
            const uint32x4_t level = vandq_u32(shifted, vdupq_n_u32(7));
            // The four bytes of a level's float.
            const uint32x4_t bytes =
                vmlaq_u32(vdupq_n_u32(0x03020100u), level, vdupq_n_u32(0x04040404u));
            const V size = vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
            const V value = size * set1(weights[0]);
            const uint32x4_t positive = vshlq_u32(vdupq_n_u32(*sign >> 4 * half), to_top);
            const uint32x4_t negative = vbicq_u32(vdupq_n_u32(kSign), positive);
            values[half] = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(value), negative));
        }
    }

  private:
    static constexpr uint32_t kSign = 0x80000000u;
    static constexpr uint64_t kBits = 0x8040201008040201u; // a bit of its own in each byte
};

} // namespace

HFK_DEFINE_KERNEL(neon_kernel, Neon, ByteScan, rerank<Neon>);
