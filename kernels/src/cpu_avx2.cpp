#if defined(__x86_64__)
#include <immintrin.h>
#define AK_VARIANT avx2
#define AK_LANES 8
#include "cpu_kernels.h"
#endif
