// ParisKV's codes on x86 with AVX2; compiled with these instructions, called where they are.
#include "paris_encode_kernel.h"

void encode_avx2(const hfk_paris_encoding &request, int64_t batch, int64_t head, int64_t first,
                 int64_t last) {
    encode_keys(request, batch, head, first, last);
}
