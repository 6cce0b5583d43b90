// Threads that wait between calls. They are started at the first call that wants them; a forked child starts its own.
#ifndef AUTOAMP_KERNELS_THREADS_H
#define AUTOAMP_KERNELS_THREADS_H

#include "variant.h"

// Does chunks [0, chunks) with up to `threads` threads, the caller's among them. Returns the first result that is not 0.
int run_chunks(ak_chunks work, const void* args, ak_int64 chunks, int threads);

#endif
