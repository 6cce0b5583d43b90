// A CUDA driver that runs the kernels on the host: what tests load instead of libcuda.so.1 where there is no GPU.
//
// The kernels' own source is compiled into it. The threads of a block are contexts that take turns: each runs up to the
// next barrier, then the next one does. A device's memory is the host's. Launches are written down, and failures can be
// asked for. What it cannot show: races within a block, alignment faults, and anything about time.
#include <dlfcn.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define __CUDACC__
#define AK_EMULATED
#define AK_LAUNCHED(TYPE) const TYPE& launch
#define __device__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static

struct Index {
  unsigned x;
};
Index threadIdx, blockIdx, blockDim;
static std::vector<ucontext_t> contexts;
static ucontext_t turns;

static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &turns); }

static int __syncthreads_or(int value) {
  static int values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  int any = 0;
  for (unsigned i = 0; i < blockDim.x; i++) any |= values[i];
  __syncthreads();
  return any;
}

template <class T>
static T __shfl_down_sync(unsigned, T value, int offset) {
  static T values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  T other = (int)(threadIdx.x % 32) + offset < 32 ? values[threadIdx.x + offset] : value;
  __syncthreads();
  return other;
}

template <class To, class From>
static To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float half_to_float(unsigned short h) { return (float)bits<_Float16>(h); }
static unsigned short float_to_half(float x) { return bits<unsigned short>((_Float16)x); }

struct float4 {
  float x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

#include "cuda_kernels.cu"

#define API extern "C" __attribute__((visibility("default")))

typedef void (*Kernel)(const void* launch);

namespace {

std::mutex one_at_a_time;
std::string journal, failing;
int failure, version = 13000, devices = 1, capability = 90;
std::vector<std::vector<char>> stacks;
std::vector<bool> done;
Kernel running;
const void* parameter;

void thread() {
  running(parameter);
  done[threadIdx.x] = true;
}

void run_block() {
  unsigned threads = blockDim.x;
  contexts.resize(threads), stacks.resize(threads), done.assign(threads, false);
  for (unsigned i = 0; i < threads; i++) {
    stacks[i].resize(1 << 16);
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks[i].data(), contexts[i].uc_stack.ss_size = stacks[i].size();
    contexts[i].uc_link = &turns;
    makecontext(&contexts[i], thread, 0);
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

int result_of(const char* function) { return failing == function ? failure : 0; }

}  // namespace

// -- for tests --

// Lines "kernel blocks threads stream" of all launches since the last call.
API const char* emulated_launches() {
  static std::string given;
  given.swap(journal);
  journal.clear();
  return given.c_str();
}

API void emulated_failure(const char* function, int result) { failing = function, failure = result; }

API void emulated_device(int driver_version, int count, int compute_capability) {
  version = driver_version, devices = count, capability = compute_capability;
}

// -- the driver --

API int cuInit(unsigned) { return result_of("cuInit"); }
API int cuDriverGetVersion(int* to) { return *to = version, 0; }
API int cuDeviceGetCount(int* to) { return *to = devices, 0; }
API int cuDeviceGet(int* to, int device) { return *to = device, device < devices ? 0 : 101; }
API int cuDeviceGetAttribute(int* to, int attribute, int) {
  return *to = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0, 0;
}

static thread_local std::vector<void*> current;
API int cuDevicePrimaryCtxRetain(void** to, int device) { return *to = (void*)(16l + device), 0; }
API int cuCtxGetCurrent(void** to) { return *to = current.empty() ? nullptr : current.back(), 0; }
API int cuCtxPushCurrent_v2(void* context) { return current.push_back(context), 0; }
API int cuCtxPopCurrent_v2(void** to) { return *to = current.back(), current.pop_back(), 0; }

// An image that begins with "refused" is refused.
API int cuModuleLoadData(void** to, const void* image) {
  if (current.empty()) return 201;
  if (!std::strncmp((const char*)image, "refused", 7)) return 209;
  return *to = (void*)image, result_of("cuModuleLoadData");
}
API int cuModuleUnload(void*) { return 0; }
API int cuModuleGetFunction(void** to, void*, const char* name) {
  static void* self = [] {
    Dl_info info;
    dladdr((void*)cuInit, &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *to = dlsym(self, name);
  return *to ? result_of("cuModuleGetFunction") : 500;
}

API int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                       void* stream, void** parameters, void**) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  Dl_info info;
  dladdr(function, &info);
  char line[256];
  std::snprintf(line, sizeof line, "%s %u %u %zu\n", info.dli_sname, x, threads, (size_t)stream);
  journal += line;
  if (current.empty() || !x || y != 1 || z != 1) return 1;
  if (int wrong = result_of("cuLaunchKernel")) return wrong;
  running = (Kernel)function, parameter = parameters[0], blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_block();
  return 0;
}

API int cuGetErrorName(int result, const char** to) {
  return *to = result == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr, 0;
}
API int cuGetErrorString(int result, const char** to) { return *to = result == 700 ? "an illegal address" : nullptr, 0; }
