// LAMB and the backward of RMS norms on a CPU. The compiler makes vectors of the loops, for three kinds of processors.
#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

#if !defined(AK_CLONES)
#if defined(__x86_64__) && !defined(__clang__)
#define AK_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define AK_CLONES
#endif
#endif

namespace {

// Calls work(from, to) for equal shares of `units`, each by a thread of its own, the last by the caller.
template <class Work>
void by_threads(int64_t units, int64_t least, int threads, Work work) {
  threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, units / std::max<int64_t>(1, least)));
  std::vector<std::thread> started;
  int64_t from = 0;
  try {
    for (int i = 1; i < threads; i++) {
      int64_t to = units * i / threads;
      started.emplace_back(work, from, to);
      from = to;
    }
  } catch (const std::system_error&) {
    // No more threads are to be had: the caller does the rest.
  }
  work(from, units);
  for (std::thread& one : started) one.join();
}

// Elements whose squares 16 lanes add up in fp32, 128 each, before they go on in fp64; and those of one loop.
const int64_t BLOCK = 2048;
const int WIDTH = 256, LANES = 16;

// A step of chunks [from, to). Sums of squares go to `space`, two a chunk.
template <class Step, bool SUMS>
AK_CLONES void step_chunks(const StepArgs& a, int64_t from, int64_t to) {
  int64_t tensor = std::upper_bound(a.first_chunk, a.first_chunk + a.tensors + 1, from) - a.first_chunk - 1;
  for (int64_t chunk = from; chunk < to; chunk++) {
    while (a.first_chunk[tensor + 1] <= chunk) tensor++;
    int64_t begin = (chunk - a.first_chunk[tensor]) * AK_CHUNK, count = std::min(a.counts[tensor] - begin, AK_CHUNK);
    void* lists[AK_LISTS];
    for (int list = 0; list < AK_LISTS; list++) lists[list] = a.lists[list] ? a.lists[list][tensor] : nullptr;
    Step step{Step::numbers(a, tensor), {lists, begin}};
    double sums[2] = {0.0, 0.0};
    for (int64_t first = 0; first < count; first += BLOCK) {
      int64_t i = first, last = std::min(first + BLOCK, count);
      for (; i + WIDTH <= last; i += WIDTH) step.template at<WIDTH>(i);
      for (; i < last; i++) step.template at<1>(i);
      if constexpr (SUMS) sums[0] += step.params.take(), sums[1] += step.updates.take();
    }
    if (SUMS && step.c.trust) a.space[2 * chunk] = sums[0], a.space[2 * chunk + 1] = sums[1];
  }
}

template <class Step, bool SUMS>
void step_all(const StepArgs& a) {
  by_threads(a.chunks, 8, a.threads, [&a](int64_t from, int64_t to) { step_chunks<Step, SUMS>(a, from, to); });
}

// Rows [from, to) of one block; `sums` is NULL, or gets the block's part of the weight's gradient.
template <class G, class X>
AK_CLONES void norm_rows(const NormArgs& a, int64_t from, int64_t to, float* sums) {
  if (sums) std::fill(sums, sums + a.columns, 0.0f);
  for (int64_t row = from; row < to; row++) {
    const typename G::type* grad = (const typename G::type*)a.grad + row * a.columns;
    const typename X::type* in = (const typename X::type*)a.in + row * a.columns;
    typename X::type* out = a.grad_in ? (typename X::type*)a.grad_in + row * a.columns : nullptr;
    float rstd = a.rstds[row];
    double all = 0.0;
    for (int64_t first = 0; first < a.columns; first += WIDTH) {
      int count = (int)std::min<int64_t>(WIDTH, a.columns - first);
      float products[WIDTH], lanes[LANES] = {};
      for (int i = 0; i < count; i++) products[i] = G::wide(grad[first + i]) * (X::wide(in[first + i]) * rstd);
      for (int i = 0; sums && i < count; i++) sums[first + i] += products[i];
      for (int i = 0; i < count; i++) products[i] *= a.weight[first + i];
      for (int i = count; i < WIDTH; i++) products[i] = 0.0f;
      for (int i = 0; i < WIDTH; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += products[i + lane];
      for (float lane : lanes) all += (double)lane;
    }
    float mean = (float)(all / (double)a.columns);
    for (int64_t i = 0; out && i < a.columns; i++)
      out[i] = X::narrow(rstd * (G::wide(grad[i]) * a.weight[i] - X::wide(in[i]) * rstd * mean));
  }
}

template <class G, class X>
int norm_all(const NormArgs& a) {
  int64_t blocks = (a.rows + a.rows_at_once - 1) / a.rows_at_once;
  by_threads(blocks, 1, a.threads, [&a](int64_t from, int64_t to) {
    for (int64_t block = from; block < to; block++) {
      int64_t first = block * a.rows_at_once, last = std::min(first + a.rows_at_once, a.rows);
      norm_rows<G, X>(a, first, last, a.partial ? a.partial + block * a.columns : nullptr);
    }
  });
  for (int64_t i = 0; a.partial && i < a.columns; i++) {
    double all = 0.0;
    for (int64_t block = 0; block < blocks; block++) all += (double)a.partial[block * a.columns + i];
    a.grad_weight[i] = (float)all;
  }
  return AK_OK;
}

template <class X>
int norm_of(const NormArgs& a) {
  if (a.grad_dtype == AK_F32) return norm_all<F32, X>(a);
  if (a.grad_dtype == AK_F16) return norm_all<F16, X>(a);
  return a.grad_dtype == AK_BF16 ? norm_all<BF16, X>(a) : AK_WRONG_DTYPE;
}

}  // namespace

AK_PUBLIC int ak_version() { return AK_VERSION; }

AK_PUBLIC int ak_cpu_lamb(const StepArgs* args) {
  const StepArgs& a = *args;
  if (a.found_inf && *a.found_inf != 0.0f) return AK_OK;
  return by_dtypes(a, [&a](auto grad, auto param, auto half) -> int {
    step_all<Lamb<decltype(grad), decltype(param), decltype(half)>, true>(a);
    if (!(a.flags & AK_TRUST)) return AK_OK;
    for (int64_t tensor = 0; tensor < a.tensors; tensor++) {
      double params = 0.0, updates = 0.0;
      for (int64_t chunk = a.first_chunk[tensor]; chunk < a.first_chunk[tensor + 1]; chunk++)
        params += a.space[2 * chunk], updates += a.space[2 * chunk + 1];
      a.space[2 * a.chunks + tensor] = trust_ratio(params, updates);
    }
    // Reads no gradients: of any dtype.
    step_all<LambLast<F32, decltype(param), decltype(half)>, false>(a);
    return AK_OK;
  });
}

AK_PUBLIC int ak_cpu_rms_norm_backward(const NormArgs* a) {
  if (a->in_dtype == AK_F16) return norm_of<F16>(*a);
  return a->in_dtype == AK_BF16 ? norm_of<BF16>(*a) : AK_WRONG_DTYPE;
}
