// LAMB on a CPU. The compiler makes vectors of the loops, for three kinds of processors.
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
const int WIDTH = 256;

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
