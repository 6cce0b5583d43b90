// How a function is declared that is compiled into its caller, on a host or on a GPU.
#ifndef AUTOAMP_KERNELS_FUNCTION_H
#define AUTOAMP_KERNELS_FUNCTION_H

#include "abi.h"

#if defined(__CUDACC__)
#define AK_FN __device__ __forceinline__
#define AK_POW pow
#define AK_SQRT sqrt
#else
#define AK_FN static inline __attribute__((always_inline))
#define AK_POW __builtin_pow
#define AK_SQRT __builtin_sqrt
#endif

#endif
