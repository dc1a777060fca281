// Any processor: vectors of four floats, which the compiler maps to what there is.
#include "paris_kernel.h"

namespace {

struct Portable {
    typedef float V __attribute__((vector_size(16)));
    typedef uint32_t U __attribute__((vector_size(16)));

    template <class T> static constexpr bool multiplies = false;
    static constexpr bool few_registers = false;
    static constexpr int lanes = 4;
    static constexpr int heads = 2;   // 8 sums, 4 keys and a query in 16 registers
    static constexpr int columns = 4;

    static V set1(float x) { return V{x, x, x, x}; }

    static V load(const float *from) {
        V x;
        __builtin_memcpy(&x, from, sizeof x);
        return x;
    }

    static U widen(const uint16_t *from) {
        typedef uint16_t S __attribute__((vector_size(8)));
        S x;
        __builtin_memcpy(&x, from, sizeof x);
        return __builtin_convertvector(x, U);
    }

    static V load(const Bf16 *from) { return as_float(widen(&from->bits) << 16); }

    // Moves the exponent to its place and its bias; what has exponent 0 is then off by 2^-14, which
    // a subtraction takes away, and what has exponent 31 is Inf or NaN.
    static V load(const Half *from) {
        const U bits = widen(&from->bits);
        const U shifted = (bits & 0x7fffu) << 13;
        const U exponent = shifted & 0x0f800000u;
        const U normal = shifted + 0x38000000u;
        const U special = shifted + 0x70000000u;
        const U low = as_bits(as_float(shifted + 0x38800000u) - set1(6.103515625e-5f));
        const U is_low = static_cast<U>(exponent == 0u);
        const U is_special = static_cast<U>(exponent == 0x0f800000u);
        const U size =
            (low & is_low) | (special & is_special) | (normal & ~(is_low | is_special));
        return as_float(size | ((bits & 0x8000u) << 16));
    }

    static V load(const Int8 *from) {
        return V{static_cast<float>(from[0].number), static_cast<float>(from[1].number),
                 static_cast<float>(from[2].number), static_cast<float>(from[3].number)};
    }

    static void load_pair(const float *from, V &a, V &b) { a = load(from), b = load(from + lanes); }
    static void load_pair(const Half *from, V &a, V &b) { a = load(from), b = load(from + lanes); }

    static void load_pair(const Bf16 *from, V &a, V &b) {
        U bits;
        __builtin_memcpy(&bits, from, sizeof bits);
        const V low = as_float(bits << 16), high = as_float(bits & 0xffff0000u);
        a = kLittle ? low : high, b = kLittle ? high : low;
    }

    template <class T> static V load_some(const T *from, int count) {
        T all[lanes] = {};
        for (int i = 0; i < count; ++i) all[i] = from[i];
        return load(all);
    }

    // Numbers of `lanes / 2` points of a grid [*, 2].
    static V pairs_at(const uint8_t *codes, const float *grid, int) {
        const float *first = grid + 2 * codes[0], *second = grid + 2 * codes[1];
        return V{first[0], first[1], second[0], second[1]};
    }

    // Number i is x[i ^ H].
    template <int H> static V swapped(V x) {
        return H == 1 ? V{x[1], x[0], x[3], x[2]} : V{x[2], x[3], x[0], x[1]};
    }

    // Numbers of a and b in turn: those of the lower halves, and of the upper ones.
    static void zip(V a, V b, V &low, V &high) {
        low = V{a[0], b[0], a[1], b[1]}, high = V{a[2], b[2], a[3], b[3]};
    }

    static void store(float *to, V x) { __builtin_memcpy(to, &x, sizeof x); }
    static V fma(V a, V b, V c) { return a * b + c; }
    static V max(V a, V b) { return where_less(a, b, b, a); }
    static V abs(V x) { return as_float(as_bits(x) & 0x7fffffffu); }

    static V copy_sign(V size, V sign) {
        return as_float(as_bits(size) | (as_bits(sign) & 0x80000000u));
    }

    static V where_less(V a, V b, V yes, V no) {
        const U mask = (U)(a < b);
        return as_float((as_bits(yes) & mask) | (as_bits(no) & ~mask));
    }

    // 2^n of the n in the low bits of `shifted`.
    static V power_of_two(V shifted) { return as_float((as_bits(shifted) << 23) + 0x3f800000u); }

    static float largest(V x) {
        float top = x[0];
        for (int i = 1; i < lanes; ++i) top = x[i] > top ? x[i] : top;
        return top;
    }

    static void store_sums(float *to, V a, V b, V c, V d) {
        const V sums = {a[0] + a[1] + a[2] + a[3], b[0] + b[1] + b[2] + b[3],
                        c[0] + c[1] + c[2] + c[3], d[0] + d[1] + d[2] + d[3]};
        store(to, sums);
    }

    // Bit i says whether number i is at least `limit`.
    static uint32_t at_least16(const float *from, float limit) {
        uint32_t bits = 0;
        for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(from[i] >= limit) << i;
        return bits;
    }

    static uint64_t at_least64(const uint8_t *from, uint8_t limit) {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(from[i] >= limit) << i;
        return bits;
    }

    static int64_t put_places(uint64_t chosen, int32_t base, int32_t *to) {
        return put_places_one_by_one(chosen, base, to);
    }

    // Eight coordinates: level times weight, with its sign.
    static void decode(const uint8_t *magnitude, const uint8_t *sign, const float *weights,
                       const float *levels, V (&values)[2]) {
        const uint32_t word = magnitude[0] | magnitude[1] << 8 | magnitude[2] << 16;
        for (int half = 0; half < 2; ++half) {
            V own = set1(0.0f);
            for (int j = 0; j < 4; ++j) {
                const float level = levels[word >> (12 * half + 3 * j) & 7] * weights[0];
                own[j] = *sign >> (4 * half + j) & 1 ? level : -level;
            }
            values[half] = own;
        }
    }

  private:
    static constexpr bool kLittle = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

    static V as_float(U x) { return (V)x; }
    static U as_bits(V x) { return (U)x; }
};

} // namespace

HFK_DEFINE_KERNEL(portable_kernel, Portable, ByteScan, rerank<Portable>);
