// A CUDA device that computes nothing: memory is the host's, copies copy, kernels and libraries do nothing and are
// counted.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <pthread.h>
#include <sys/mman.h>
#include <driver_types.h>

enum { LAUNCH, LIBRARY, H2D, D2H, D2D, MEMSET, STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC, MALLOC, STREAM_WAIT, KINDS };
static long counts[KINDS];
static FILE *journal = NULL;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void null_counts(long *out) { memcpy(out, counts, sizeof counts); }
void null_journal(const char *path) {
    pthread_mutex_lock(&lock);
    if (journal) fclose(journal);
    journal = path ? fopen(path, "w") : NULL;
    pthread_mutex_unlock(&lock);
}
void null_count(int kind, const char *name, size_t size) {
    __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED);
    if (journal) {
        pthread_mutex_lock(&lock);
        if (journal) fprintf(journal, "%d %s %zu\n", kind, name ? name : "?", size);
        pthread_mutex_unlock(&lock);
    }
}
int null_library(const char *name) {
    null_count(LIBRARY, name, 0);
    return 0;
}

// -- kernels --
#define BUCKETS (1 << 19)
static struct {
    const void *host;
    const char *name;
} names[BUCKETS];
static void *dummy[4];
void **__cudaRegisterFatBinary(void *x) { return dummy; }
void __cudaRegisterFatBinaryEnd(void **x) {}
void __cudaUnregisterFatBinary(void **x) {}
void __cudaRegisterVar(void **a, char *b, char *c, const char *d, int e, size_t f, int g, int h) {}
char __cudaInitModule(void **x) { return 1; }
void __cudaRegisterFunction(void **h, const char *host, char *fun, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *e) {
    size_t at = ((uintptr_t)host * 0x9E3779B97F4A7C15ull) >> 45;
    while (names[at % BUCKETS].host && names[at % BUCKETS].host != host) at++;
    names[at % BUCKETS].host = host;
    names[at % BUCKETS].name = name;
}
static const char *name_of(const void *host) {
    size_t at = ((uintptr_t)host * 0x9E3779B97F4A7C15ull) >> 45;
    while (names[at % BUCKETS].host) {
        if (names[at % BUCKETS].host == host) return names[at % BUCKETS].name;
        at++;
    }
    return NULL;
}
typedef struct {
    unsigned x, y, z;
} dim3_;
static __thread struct {
    dim3_ g, b;
    size_t s;
    void *stream;
} pushed;
unsigned __cudaPushCallConfiguration(dim3_ g, dim3_ b, size_t s, void *stream) {
    pushed.g = g;
    pushed.b = b;
    pushed.s = s;
    pushed.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(dim3_ *g, dim3_ *b, size_t *s, void *stream) {
    *g = pushed.g;
    *b = pushed.b;
    *s = pushed.s;
    *(void **)stream = pushed.stream;
    return 0;
}
int __cudaGetKernel(const void **kernel, const void *f) {
    *kernel = f;
    return 0;
}
// Fills are done, so that zeros are zeros: an overflow flag that was never cleared would skip steps.
static void filled(const char *name, void **args) {
    const char *at = name && strstr(name, "vectorized_elementwise_kernel") ? strstr(name, "FillFunctorI") : NULL;
    if (!at) return;
    at += 12;
    size_t size = strchr("hab", *at)                                                       ? 1
                  : *at == 's'                                                             ? 2
                  : strchr("fi", *at)                                                      ? 4
                  : strchr("dl", *at)                                                      ? 8
                  : !strncmp(at, "N3c104HalfE", 11) || !strncmp(at, "N3c108BFloat16E", 15) ? 2
                                                                                           : 0;
    char *to = *(char **)args[2];
    if (size)
        for (long i = 0; i < *(int *)args[0]; i++) memcpy(to + i * size, args[1], size);
}
int __cudaLaunchKernel(const void *f, dim3_ g, dim3_ b, void **args, size_t s, void *stream) {
    const char *name = name_of(f);
    null_count(LAUNCH, name, 0);
    filled(name, args);
    return 0;
}
int cudaLaunchKernel(const void *f, dim3_ g, dim3_ b, void **args, size_t s, void *stream) {
    return __cudaLaunchKernel(f, g, b, args, s, stream);
}
int cudaLaunchCooperativeKernel(const void *f, dim3_ g, dim3_ b, void **args, size_t s, void *stream) {
    null_count(LAUNCH, name_of(f), 0);
    return 0;
}
int cudaLaunchKernelExC(const void *config, const void *f, void **args) {
    null_count(LAUNCH, name_of(f), 0);
    return 0;
}
int cudaLaunchHostFunc(void *stream, void (*fn)(void *), void *data) {
    fn(data);
    return 0;
}
int cudaStreamAddCallback(void *stream, void (*fn)(void *, int, void *), void *data, unsigned flags) {
    fn(stream, 0, data);
    return 0;
}
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = 80;
    a->binaryVersion = 80;
    a->maxDynamicSharedSizeBytes = 163 << 10;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int size, size_t s, unsigned flags) {
    *n = 2;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int size, size_t s) {
    *n = 2;
    return 0;
}

// -- the device: an A100 by its figures, since on newer ones torch prefers the attention of cuDNN, which needs engines --
int cudaGetDeviceCount(int *n) {
    *n = 1;
    return 0;
}
int cudaGetDevice(int *d) {
    *d = 0;
    return 0;
}
int cudaSetDevice(int d) { return d == 0 ? 0 : 101; }
int cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
int cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorString(int e) { return "null device error"; }
const char *cudaGetErrorName(int e) { return "nullDeviceError"; }
int cudaDeviceGetPCIBusId(char *s, int n, int d) {
    strncpy(s, "0000:00:00.0", n);
    return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d != 0) return 101;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Null device");
    p->totalGlobalMem = 80ull << 30;
    p->sharedMemPerBlock = 48 << 10;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 8;
    p->minor = 0;
    p->multiProcessorCount = 108;
    p->concurrentKernels = 1;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = 1;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 164 << 10;
    p->regsPerMultiprocessor = 65536;
    p->managedMemory = 1;
    p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = 163 << 10;
    p->maxBlocksPerMultiProcessor = 32;
    p->textureAlignment = 512;
    p->memPitch = 2147483647;
    p->streamPrioritiesSupported = 1;
    p->maxTexture1D = 131072;
    p->memoryBusWidth = 5120;
    return 0;
}
int cudaDeviceGetAttribute(int *v, int attr, int d) {
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 48 << 10; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = 108; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 164 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 163 << 10; break;
    case cudaDevAttrL2CacheSize: *v = 50 << 20; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    default: *v = 0;
    }
    return 0;
}
int cudaDeviceCanAccessPeer(int *v, int a, int b) {
    *v = 0;
    return 0;
}
int cudaMemGetInfo(size_t *freed, size_t *total) {
    *freed = *total = 80ull << 30;
    return 0;
}
static int nothing(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version, unsigned long long flags,
                                     int *result) {
    *fn = (void *)nothing;
    if (result) *result = 0;
    return 0;
}
int cudaGetSymbolAddress(void **p, const void *symbol) {
    *p = calloc(1, 1 << 16);
    return 0;
}

// -- memory --
// Large blocks are fresh pages, which cost nothing until somebody writes: what kernels leave untouched is never there.
// A block's size lies in front of it. Sizes are counted in the allocator's units of 512 bytes.
enum { FRONT = 4096, LARGE = 1 << 20 };
static long live, peak;
void null_memory(long *out) {
    out[0] = live;
    out[1] = peak;
}
void null_reset_peak(void) { peak = live; }
static void held(long bytes) {
    long now = __atomic_add_fetch(&live, bytes, __ATOMIC_RELAXED), seen = peak;
    while (now > seen && !__atomic_compare_exchange_n(&peak, &seen, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
static int give(void **p, size_t n) {
    null_count(MALLOC, "malloc", n);
    n = (n + 511) / 512 * 512;
    if (n > (64ull << 30)) return 2;
    char *block;
    if (n >= LARGE) {
        block = mmap(NULL, n + FRONT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (block == MAP_FAILED) return 2;
    } else {
        if (posix_memalign((void **)&block, 512, n + FRONT)) return 2;
        memset(block + FRONT, 0, n);
    }
    *(size_t *)block = n;
    held(n);
    *p = block + FRONT;
    return 0;
}
static int take_back(void *p) {
    if (!p) return 0;
    char *block = (char *)p - FRONT;
    size_t n = *(size_t *)block;
    held(-(long)n);
    if (n >= LARGE) munmap(block, n + FRONT);
    else free(block);
    return 0;
}
int cudaMalloc(void **p, size_t n) { return give(p, n); }
int cudaMallocAsync(void **p, size_t n, void *s) { return give(p, n); }
int cudaFree(void *p) { return take_back(p); }
int cudaFreeAsync(void *p, void *s) { return take_back(p); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return posix_memalign(p, 4096, n ? n : 4096) ? 2 : 0; }
int cudaFreeHost(void *p) {
    free(p);
    return 0;
}
static int copied(void *to, const void *from, size_t n, int kind, const char *name) {
    null_count(kind == 1 ? H2D : kind == 2 ? D2H : D2D, name, n);
    memmove(to, from, n);
    return 0;
}
int cudaMemcpy(void *to, const void *from, size_t n, int kind) {
    null_count(STREAM_SYNC, "cudaMemcpy", n);
    return copied(to, from, n, kind, "cudaMemcpy");
}
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) {
    return copied(to, from, n, kind, "cudaMemcpyAsync");
}
int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, void *s) {
    return copied(to, from, n, 3, "cudaMemcpyPeerAsync");
}
int cudaMemset(void *p, int v, size_t n) {
    null_count(MEMSET, "memset", n);
    memset(p, v, n);
    return 0;
}
int cudaMemsetAsync(void *p, int v, size_t n, void *s) {
    null_count(MEMSET, "memset", n);
    memset(p, v, n);
    return 0;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    return 0;
}

// -- streams and events --
static int made(void **p) {
    *p = calloc(1, 64);
    return 0;
}
int cudaStreamCreate(void **s) { return made(s); }
int cudaStreamCreateWithFlags(void **s, unsigned f) { return made(s); }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return made(s); }
int cudaStreamSynchronize(void *s) {
    null_count(STREAM_SYNC, "cudaStreamSynchronize", 0);
    return 0;
}
int cudaStreamWaitEvent(void *s, void *e, unsigned f) {
    null_count(STREAM_WAIT, "wait", 0);
    return 0;
}
int cudaStreamIsCapturing(void *s, int *status) {
    *status = 0;
    return 0;
}
int cudaStreamGetCaptureInfo(void *s, int *status, unsigned long long *id, void *g, void *d, void *e, size_t *n) {
    *status = 0;
    if (id) *id = 0;
    return 0;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaStreamGetPriority(void *s, int *p) {
    *p = 0;
    return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}
int cudaDeviceSynchronize(void) {
    null_count(DEVICE_SYNC, "cudaDeviceSynchronize", 0);
    return 0;
}
int cudaEventCreate(void **e) { return made(e); }
int cudaEventCreateWithFlags(void **e, unsigned f) { return made(e); }
int cudaEventSynchronize(void *e) {
    null_count(EVENT_SYNC, "cudaEventSynchronize", 0);
    return 0;
}
int cudaEventElapsedTime(float *ms, void *a, void *b) {
    *ms = 1.0f;
    return 0;
}

// -- cuBLAS --
int cublasGetPointerMode_v2(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasGetMathMode(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const void *al, const void *A, int At, int lda,
                 const void *B, int Bt, int ldb, const void *be, void *C, int Ct, int ldc, int compute, int algo) {
    char s[96];
    snprintf(s, sizeof s, "cublasGemmEx:%d,%d,%d", At, Bt, Ct);
    null_count(LIBRARY, s, 0);
    return 0;
}
int cublasGemmStridedBatchedEx(void *h, int ta, int tb, int m, int n, int k, const void *al, const void *A, int At,
                               int lda, long long sA, const void *B, int Bt, int ldb, long long sB, const void *be,
                               void *C, int Ct, int ldc, long long sC, int b, int compute, int algo) {
    char s[96];
    snprintf(s, sizeof s, "cublasGemmStridedBatchedEx:%d,%d,%d", At, Bt, Ct);
    null_count(LIBRARY, s, 0);
    return 0;
}
struct layout {
    int type;
};
int cublasLtMatrixLayoutCreate(void **p, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *p = calloc(1, 64);
    ((struct layout *)*p)->type = type;
    return 0;
}
int cublasLtMatmulDescCreate(void **p, int compute, int scale) { return made(p); }
int cublasLtMatmulPreferenceCreate(void **p) { return made(p); }
int cublasLtMatmul(void *h, void *d, const void *al, const void *A, struct layout *a, const void *B, struct layout *b,
                   const void *be, const void *C, struct layout *c, void *D, struct layout *dd, void *algo, void *w,
                   size_t n, void *s) {
    char t[96];
    snprintf(t, sizeof t, "cublasLtMatmul:%d,%d,%d", a->type, b->type, c->type);
    null_count(LIBRARY, t, 0);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p, int n, void *results,
                                   int *found) {
    memset(results, 0, 256);
    *found = 1;
    return 0;
}
