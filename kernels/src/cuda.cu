// The steps on a GPU, for nvcc: a table of tensors travels with each launch, so nothing is copied or waited for.
#include "kernels.h"

#include <cstdio>

#if !defined(AK_EMULATED)
#define AK_START(KERNEL, BLOCKS, STREAM, ARGS) KERNEL<<<BLOCKS, THREADS, 0, (cudaStream_t)(STREAM)>>>(ARGS)
#endif

namespace {

const int THREADS = 512, WARP = 32, WARPS = THREADS / WARP;
// Elements that a thread takes at once.
const int WIDTH = 4;
// Bytes of parameters that a kernel may have, from CUDA 12.1 on.
const int PARAMS = 32764;
const int OLDEST_DRIVER = 12010;
const int ROWS = (PARAMS - 40 - (int)sizeof(StepArgs)) / (8 * AK_LISTS + 8 + 4);

// Some tensors of a call.
struct Launch {
  StepArgs args;         // its lists are the host's: not to be read by a kernel
  int64_t first_tensor;  // tensors of the call before this launch's
  int64_t first_chunk;   // chunks of those
  int32_t rows;
  uint32_t first_block[ROWS + 1];
  int64_t counts[ROWS];
  void* pointers[ROWS][AK_LISTS];
};
static_assert(sizeof(Launch) <= PARAMS && ROWS >= 400, "400 tensors must go by one launch");

thread_local char message[256] = "";

int failed(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return AK_OK;
  std::snprintf(message, sizeof message, "%s failed: %s", what, cudaGetErrorString(error));
  return AK_FAILED;
}

// Returns the sum over all threads to thread 0, in an order that is always the same.
__device__ double sum_of_block(double value) {
  __shared__ double of_warp[WARPS];
  for (int offset = WARP / 2; offset; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  // All have read what an earlier call left here.
  __syncthreads();
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < WARPS; warp++) value += of_warp[warp];
  return value;
}

__device__ bool is_skipped(const StepArgs& a) { return a.found_inf && *a.found_inf != 0.0f; }

// A block does one chunk of one tensor.
template <class Step, bool SUMS>
__global__ void __launch_bounds__(THREADS) step_kernel(const __grid_constant__ Launch launch) {
  if (is_skipped(launch.args)) return;
  int row = 0, high = launch.rows;  // the last row whose first block is not behind this one
  while (high - row > 1) {
    int middle = (row + high) / 2;
    if (launch.first_block[middle] <= blockIdx.x) row = middle;
    else high = middle;
  }
  int64_t begin = (int64_t)(blockIdx.x - launch.first_block[row]) * AK_CHUNK, left = launch.counts[row] - begin;
  __shared__ typename Step::Numbers numbers;
  if (threadIdx.x == 0) numbers = Step::numbers(launch.args, launch.first_tensor + row);
  __syncthreads();
  Step step{numbers, {launch.pointers[row], begin}};
  int count = (int)(left < AK_CHUNK ? left : AK_CHUNK), groups = step.t.template aligned<WIDTH>() ? count / WIDTH : 0;
  for (int i = threadIdx.x; i < groups; i += THREADS) step.template at<WIDTH>(i * WIDTH);
  for (int i = groups * WIDTH + threadIdx.x; i < count; i += THREADS) step.template at<1>(i);
  if constexpr (SUMS) {
    if (!step.c.trust) return;
    double params = sum_of_block(step.params.take()), updates = sum_of_block(step.updates.take());
    double* sums = launch.args.space + 2 * (launch.first_chunk + blockIdx.x);
    if (threadIdx.x == 0) sums[0] = params, sums[1] = updates;
  }
}

// A block for each tensor of the launch.
__global__ void __launch_bounds__(THREADS) lamb_ratios(const __grid_constant__ Launch launch) {
  if (is_skipped(launch.args)) return;
  double params = 0.0, updates = 0.0;
  for (uint32_t i = launch.first_block[blockIdx.x] + threadIdx.x; i < launch.first_block[blockIdx.x + 1]; i += THREADS) {
    const double* sums = launch.args.space + 2 * (launch.first_chunk + i);
    params += sums[0], updates += sums[1];
  }
  params = sum_of_block(params), updates = sum_of_block(updates);
  int64_t tensor = launch.first_tensor + blockIdx.x;
  if (threadIdx.x == 0) launch.args.space[2 * launch.args.chunks + tensor] = trust_ratio(params, updates);
}

// Calls start(launch, blocks) for each launch of a call, on its device.
template <class Start>
int each_launch(const StepArgs& a, Start start) {
  int before = 0, wrong = failed(cudaGetDevice(&before), "cudaGetDevice");
  if (!wrong) wrong = failed(cudaSetDevice(a.device), "cudaSetDevice");
  Launch launch;
  launch.args = a;
  for (int64_t tensor = 0; !wrong && tensor < a.tensors;) {
    launch.first_tensor = tensor, launch.first_chunk = a.first_chunk[tensor];
    for (launch.rows = 0; launch.rows < ROWS && tensor < a.tensors; launch.rows++, tensor++) {
      launch.first_block[launch.rows] = (uint32_t)(a.first_chunk[tensor] - launch.first_chunk);
      launch.counts[launch.rows] = a.counts[tensor];
      for (int list = 0; list < AK_LISTS; list++)
        launch.pointers[launch.rows][list] = a.lists[list] ? a.lists[list][tensor] : nullptr;
    }
    launch.first_block[launch.rows] = (uint32_t)(a.first_chunk[tensor] - launch.first_chunk);
    if (launch.first_block[launch.rows] == 0) continue;
    start(launch, launch.first_block[launch.rows]);
    wrong = failed(cudaGetLastError(), "the launch");
  }
  cudaSetDevice(before);
  return wrong;
}

template <template <class, class, class> class Step>
int run(const StepArgs& a) {
  return by_dtypes(a, [&a](auto grad, auto param, auto half) -> int {
    typedef Step<decltype(grad), decltype(param), decltype(half)> Kind;
    return each_launch(a, [&a](const Launch& launch, uint32_t blocks) {
      AK_START((step_kernel<Kind, false>), blocks, a.stream, launch);
    });
  });
}

}  // namespace

AK_PUBLIC int ak_cuda_adam(const StepArgs* a) { return run<Adam>(*a); }

AK_PUBLIC int ak_cuda_sgd(const StepArgs* a) { return run<Sgd>(*a); }

AK_PUBLIC int ak_cuda_lamb(const StepArgs* args) {
  const StepArgs& a = *args;
  return by_dtypes(a, [&a](auto grad, auto param, auto half) -> int {
    typedef Lamb<decltype(grad), decltype(param), decltype(half)> First;
    // Reads no gradients: of any dtype.
    typedef LambLast<F32, decltype(param), decltype(half)> Last;
    return each_launch(a, [&a](const Launch& launch, uint32_t blocks) {
      AK_START((step_kernel<First, true>), blocks, a.stream, launch);
      if (!(a.flags & AK_TRUST)) return;
      AK_START(lamb_ratios, (uint32_t)launch.rows, a.stream, launch);
      AK_START((step_kernel<Last, false>), blocks, a.stream, launch);
    });
  });
}

// Why no kernel can run on a GPU here; an empty string where they can.
AK_PUBLIC const char* ak_cuda_problem() {
  int devices = 0, driver = 0, best = 0;
  message[0] = 0;
  if (failed(cudaDriverGetVersion(&driver), "cudaDriverGetVersion")) return message;
  if (driver < OLDEST_DRIVER) {
    std::snprintf(message, sizeof message, "the driver is missing or older than 12.1 (%d.%d); install NVIDIA's driver",
                  driver / 1000, driver % 1000 / 10);
    return message;
  }
  if (failed(cudaGetDeviceCount(&devices), "cudaGetDeviceCount")) return message;
  for (int device = 0; device < devices; device++) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    best = best < 10 * major + minor ? 10 * major + minor : best;
  }
  if (best < AK_OLDEST_CARD)
    std::snprintf(message, sizeof message, "no GPU of compute capability %d.%d or later", AK_OLDEST_CARD / 10,
                  AK_OLDEST_CARD % 10);
  return message;
}

AK_PUBLIC const char* ak_cuda_message() { return message; }
