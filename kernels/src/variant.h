// What each variant of the CPU build offers: kernels that do a range of chunks, without threads and without checks.
#ifndef AUTOAMP_KERNELS_VARIANT_H
#define AUTOAMP_KERNELS_VARIANT_H

#include "abi.h"

// Does chunks [from, to) of a call whose arguments are `args`; AK_WRONG_DTYPE where there is no such kernel.
typedef int (*ak_chunks)(const void* args, ak_int64 from, ak_int64 to);

struct Variant {
  const char* name;
  ak_chunks adam, sgd, adagrad, lamb, lamb_last, novograd, axpby, scale, norm, norm_sums, statistics;
};

extern const Variant ak_plain;
#if defined(__x86_64__)
extern const Variant ak_avx2;
extern const Variant ak_avx512;
#endif

#endif
