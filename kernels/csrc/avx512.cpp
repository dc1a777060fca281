// Compiled with AVX-512 F, BW, DQ and VL, called where they are.
#include "avx512_rerank.h"
#include "avx512_scan.h"

namespace {
typedef NibbleScan<Bytes512, ShuffledTable> Scan;
}

HFK_DEFINE_KERNEL(avx512_kernel, Avx512, Scan, BlockRerank<ShiftedPlaces>::rerank);
