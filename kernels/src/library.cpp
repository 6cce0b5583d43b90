// The functions of the ABI: they check the head, pick the device and the CPU variant, and run the chunks.
#include <atomic>
#include <cmath>
#include <cstring>

#include "abi.h"
#include "threads.h"
#include "variant.h"

#define AK_PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

struct Choice {
  const Variant* variant;
  bool runs;
};

const Choice* choices() {
#if defined(__x86_64__)
  static const Choice all[] = {
    {&ak_avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
    {&ak_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")},
    {&ak_plain, true},
    {nullptr, false},
  };
#else
  static const Choice all[] = {{&ak_plain, true}, {nullptr, false}};
#endif
  return all;
}

std::atomic<const Variant*> chosen{nullptr};

const Variant& variant() {
  const Variant* now = chosen.load(std::memory_order_relaxed);
  if (now) return *now;
  const Choice* choice = choices();
  while (!choice->runs) choice++;
  chosen.store(choice->variant, std::memory_order_relaxed);
  return *choice->variant;
}

int checked(const ak_head& head, size_t size) {
  if (head.size != size) return AK_WRONG_SIZE;
  if (head.version != AK_ABI) return AK_WRONG_VERSION;
  if (head.device != AK_CPU) return AK_NO_DEVICE;
  if (head.tensors < 0 || head.threads < 1) return AK_WRONG_VALUE;
  if (head.tensors && (!head.counts || !head.first_chunk)) return AK_WRONG_VALUE;
  return AK_OK;
}

bool skipped(const ak_head& head) { return head.found_inf && *head.found_inf != 0.0f; }

void advance(const ak_step& step, ak_int64 tensors) {
  if (!step.advance) return;
  for (ak_int64 t = 0; step.each && t < tensors; t++) *step.each[t] += 1.0f;
  if (!step.one) return;
  if (step.dtype == AK_F32) *(float*)step.one += 1.0f;
  else if (step.dtype == AK_I32) *(ak_int32*)step.one += 1;
  else *(ak_int64*)step.one += 1;
}

int run(const ak_head& head, ak_chunks work, const void* args) {
  return run_chunks(work, args, head.tensors ? head.first_chunk[head.tensors] : 0, head.threads);
}

}  // namespace

AK_PUBLIC ak_uint32 ak_abi(void) { return AK_ABI; }

AK_PUBLIC ak_int64 ak_chunk(void) { return AK_CHUNK; }

AK_PUBLIC const char* ak_cpu_variant(void) { return variant().name; }

AK_PUBLIC int ak_use_cpu_variant(const char* name) {
  for (const Choice* choice = choices(); choice->variant; choice++) {
    if (std::strcmp(choice->variant->name, name) || !choice->runs) continue;
    chosen.store(choice->variant, std::memory_order_relaxed);
    return AK_OK;
  }
  return AK_NO_DEVICE;
}

// What all optimizers' arguments have in common: gradients, parameters and half copies.
template <class Args>
int run_step(const Args* a, ak_chunks work, bool states) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (a->head.tensors && (!a->grads || !a->params || !states)) return AK_WRONG_VALUE;
  if (!a->halves != (a->half_dtype == AK_NO_DTYPE)) return AK_WRONG_VALUE;
  if (skipped(a->head)) return AK_OK;
  return run(a->head, work, a);
}

AK_PUBLIC int ak_sgd(const ak_sgd_args* a) { return run_step(a, variant().sgd, true); }

AK_PUBLIC int ak_adagrad(const ak_adagrad_args* a) { return run_step(a, variant().adagrad, a->sums); }

AK_PUBLIC int ak_scale(const ak_scale_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong || skipped(a->head)) return wrong;
  if (!a->outs != (a->out_dtype == AK_NO_DTYPE) || (a->head.tensors && !a->ins)) return AK_WRONG_VALUE;
  if ((a->norms || a->total) && !a->partial) return AK_WRONG_VALUE;
  wrong = run(a->head, variant().scale, a);
  if (wrong || !a->partial) return wrong;
  // In the order of the chunks, whatever thread did them.
  double total = 0.0;
  for (ak_int64 t = 0; t < a->head.tensors; t++) {
    double sum = 0.0;
    for (ak_int64 c = a->head.first_chunk[t]; c < a->head.first_chunk[t + 1]; c++) sum += a->partial[c];
    if (a->norms) a->norms[t] = (float)std::sqrt(sum);
    total += sum;
  }
  if (a->total) *a->total = (float)std::sqrt(total);
  return AK_OK;
}

AK_PUBLIC int ak_adam(const ak_adam_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong || skipped(a->head)) return wrong;
  if (a->head.tensors && (!a->grads || !a->params || !a->exp_avgs || !a->exp_avg_sqs)) return AK_WRONG_VALUE;
  if (!a->halves != (a->half_dtype == AK_NO_DTYPE)) return AK_WRONG_VALUE;
  // Before any count of steps is written.
  wrong = variant().adam(a, 0, 0);
  if (wrong) return wrong;
  advance(a->step, a->head.tensors);
  return run(a->head, variant().adam, a);
}
