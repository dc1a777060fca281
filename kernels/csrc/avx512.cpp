// Compiled with AVX-512 F, BW, DQ and VL, called where they are.
#include "avx512.h"

HFK_DEFINE_KERNEL(avx512_kernel, Avx512);
