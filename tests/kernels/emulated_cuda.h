// CUDA on the host, for tests where there is no GPU: included before kernels/src/cuda.cu, which g++ compiles then.
//
// The threads of a block are contexts that take turns: each runs up to the next barrier, then the next one does. A
// device's memory is the host's. It does not show races within a block, alignment faults, or anything about time.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define __CUDACC__
#define AK_EMULATED
#define AK_OLDEST_CARD 75
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __grid_constant__
#define __shared__ static

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx;
static std::vector<ucontext_t> contexts;
static ucontext_t turns;

static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &turns); }

template <class T>
static T __shfl_down_sync(unsigned, T value, int offset) {
  static T values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  T other = (int)(threadIdx.x % 32) + offset < 32 ? values[threadIdx.x + offset] : value;
  __syncthreads();
  return other;
}

// Launches since the last call of emulated_launches, a line each: the blocks, and the stream.
static std::string journal;

template <class Run>
static void emulate(unsigned blocks, unsigned threads, void* stream, Run run) {
  static std::mutex one_at_a_time;
  static std::vector<std::vector<char>> stacks;
  static std::vector<bool> done;
  static Run* running;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  journal += std::to_string(blocks) + " " + std::to_string((size_t)stream) + "\n";
  running = &run;
  contexts.resize(threads), stacks.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    done.assign(threads, false);
    for (unsigned i = 0; i < threads; i++) {
      stacks[i].resize(1 << 16);
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = stacks[i].data(), contexts[i].uc_stack.ss_size = stacks[i].size();
      contexts[i].uc_link = &turns;
      makecontext(&contexts[i], (void (*)()) + [] { (*running)(), done[threadIdx.x] = true; }, 0);
    }
    for (bool more = true; more;) {
      more = false;
      for (unsigned i = 0; i < threads; i++) {
        if (done[i]) continue;
        threadIdx.x = i;
        swapcontext(&turns, &contexts[i]);
        more |= !done[i];
      }
    }
  }
}

#define AK_START(KERNEL, BLOCKS, STREAM, ARGS) emulate(BLOCKS, THREADS, STREAM, [&] { KERNEL(ARGS); })

// -- the runtime; what a GPU would be is in environment variables --

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };

static int emulated_number(const char* name, int otherwise) {
  const char* given = std::getenv(name);
  return given ? std::atoi(given) : otherwise;
}

static const char* cudaGetErrorString(cudaError_t) { return "an illegal memory access was encountered"; }
static cudaError_t cudaGetLastError() { return emulated_number("EMULATED_ERROR", 0); }
static cudaError_t cudaGetDevice(int* device) { return *device = 0; }
static cudaError_t cudaSetDevice(int) { return 0; }
static cudaError_t cudaGetDeviceCount(int* count) { return *count = emulated_number("EMULATED_DEVICES", 1), 0; }
static cudaError_t cudaDriverGetVersion(int* version) { return *version = emulated_number("EMULATED_DRIVER", 13000), 0; }
static cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  int card = emulated_number("EMULATED_CARD", 90);
  return *value = attribute == cudaDevAttrComputeCapabilityMajor ? card / 10 : card % 10, 0;
}

extern "C" __attribute__((visibility("default"))) const char* emulated_launches() {
  static std::string given;
  given.swap(journal), journal.clear();
  return given.c_str();
}

// -- calls with CPU tensors: with EMULATED_CUDA=1 in the environment the emulated GPU takes them --

struct StepArgs;
#define EMULATED_PUBLIC extern "C" __attribute__((visibility("default")))
EMULATED_PUBLIC int ak_cuda_adam(const StepArgs*);
EMULATED_PUBLIC int ak_cuda_lamb(const StepArgs*);
EMULATED_PUBLIC int ak_cuda_sgd(const StepArgs*);
// In cpu.cpp, which is compiled with this name for its kernel.
extern "C" int ak_host_lamb(const StepArgs*);

EMULATED_PUBLIC int ak_cpu_adam(const StepArgs* a) { return ak_cuda_adam(a); }
EMULATED_PUBLIC int ak_cpu_sgd(const StepArgs* a) { return ak_cuda_sgd(a); }
EMULATED_PUBLIC int ak_cpu_lamb(const StepArgs* a) {
  return emulated_number("EMULATED_CUDA", 0) ? ak_cuda_lamb(a) : ak_host_lamb(a);
}
