// ParisKV's codes of keys: what the entry and the files for instruction sets share.
#pragma once

#include "hf_kvret_host.h"

// Encodes the keys `first .. last` of a batch row's head.
using EncodeKeys = void (*)(const hfk_paris_encoding &request, int64_t batch, int64_t head, int64_t first,
                            int64_t last);

void encode_portable(const hfk_paris_encoding &request, int64_t batch, int64_t head, int64_t first,
                     int64_t last);
#ifdef HFK_X86
void encode_avx2(const hfk_paris_encoding &request, int64_t batch, int64_t head, int64_t first,
                 int64_t last);
#endif
