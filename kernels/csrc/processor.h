// Tells which instruction sets the processor has and the operating system saves.
//
// __builtin_cpu_supports would say it too, but reads a table of the compiler's own runtime library,
// which Zig's clang lacks; and older compilers don't know all the names.
#pragma once

#ifdef HFK_X86
#include <cpuid.h>

#include <cstdint>

// Sets that CMakeLists.txt compiles for: a processor has all options of a set, or not the set.
class Processor {
  public:
    bool avx2 = false;
    bool avx512 = false;
    bool avx512_bf16 = false;
    // Whether pairs of bf16 are multiplied faster than fp32. Emerald Rapids was measured at half of
    // fp32's rate; AMD's processors were not, their documents say twice.
    bool fast_pairs = false;

    static const Processor &instance() {
        static const Processor processor;
        return processor;
    }

  private:
    // Bits of XCR0: SSE and AVX registers; masks and both halves of AVX-512's.
    static constexpr uint32_t kSavesAvx = 0x06, kSavesAvx512 = 0xe6;

    Processor() {
        const Leaf vendor(0, 0), basic(1, 0), extended(0x80000001, 0), features(7, 0), more(7, 1);
        // fma, popcnt, osxsave, avx, f16c
        if (!has(basic.ecx, {12, 23, 27, 28, 29})) return;
        const uint32_t saved = saved_registers();
        // lzcnt; bmi, avx2, bmi2
        avx2 = (saved & kSavesAvx) == kSavesAvx && has(extended.ecx, {5}) &&
               has(features.ebx, {3, 5, 8});
#ifdef HFK_EMULATED_AVX512
        avx512 = avx512_bf16 = avx2;
#else
        // f, dq, bw, vl
        avx512 = avx2 && (saved & kSavesAvx512) == kSavesAvx512 &&
                 has(features.ebx, {16, 17, 30, 31});
        // vbmi; bf16
        avx512_bf16 = avx512 && has(features.ecx, {1}) && has(more.eax, {5});
#endif
        fast_pairs = vendor.ebx == 0x68747541; // "Auth" of "AuthenticAMD"
    }

    // Zeros where the processor has no such leaf.
    struct Leaf {
        uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;

        Leaf(uint32_t leaf, uint32_t subleaf) {
            __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
        }
    };

    template <int count> static bool has(uint32_t word, const int (&bits)[count]) {
        for (int bit : bits) {
            if ((word >> bit & 1) == 0) return false;
        }
        return true;
    }

    static uint32_t saved_registers() {
        uint32_t low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
    }
};
#endif
