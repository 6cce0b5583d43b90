#define AK_VARIANT plain
#define AK_LANES 4
#include "cpu_kernels.h"
