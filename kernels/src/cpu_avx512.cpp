#if defined(__x86_64__)
#include <immintrin.h>
#define AK_VARIANT avx512
#define AK_LANES 16
#include "cpu_kernels.h"
#endif
