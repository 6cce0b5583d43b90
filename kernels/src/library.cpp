// The functions of the ABI: they check the head, pick the device and the CPU variant, and run the chunks.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "abi.h"
#include "cuda_launch.h"
#include "functors.h"
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
  if (head.device != AK_CPU && !(head.device == AK_CUDA && head.module)) return AK_NO_DEVICE;
  if (head.tensors < 0 || head.threads < 1) return AK_WRONG_VALUE;
  if (head.tensors && (!head.counts || !head.first_chunk)) return AK_WRONG_VALUE;
  return AK_OK;
}

bool on_cuda(const ak_head& head) { return head.device == AK_CUDA; }

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

AK_PUBLIC ak_int64 ak_shared(const ak_int64* begins, const ak_int64* sizes, ak_int64 count,
                             const ak_int64* written_begins, const ak_int64* written_ends, ak_int64 written) {
  for (ak_int64 i = 0; i < count; i++) {
    // The first written piece that ends behind the start of this one.
    ak_int64 at = std::upper_bound(written_ends, written_ends + written, begins[i]) - written_ends;
    if (sizes[i] && at < written && written_begins[at] < begins[i] + sizes[i]) return i;
  }
  return -1;
}

// What all optimizers' arguments have in common: gradients, parameters, half copies, and a kernel for their dtypes.
template <class Args>
int checked_step(const Args* a, ak_chunks work, bool states) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (a->head.tensors && (!a->grads || !a->params || !states)) return AK_WRONG_VALUE;
  if (!a->halves != (a->half_dtype == AK_NO_DTYPE)) return AK_WRONG_VALUE;
  // Of no chunks, so that no count of steps is written before the dtypes are known to be right.
  return work(a, 0, 0);
}

template <class Args>
int run_step(const Args* a, ak_chunks work, int (*cuda)(const Args&), bool states) {
  int wrong = checked_step(a, work, states);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda(*a);
  if (skipped(a->head)) return AK_OK;
  return run(a->head, work, a);
}

AK_PUBLIC int ak_sgd(const ak_sgd_args* a) { return run_step(a, variant().sgd, cuda_sgd, true); }

AK_PUBLIC int ak_adagrad(const ak_adagrad_args* a) { return run_step(a, variant().adagrad, cuda_adagrad, a->sums); }

// Puts the norms of chunks together in their order, whatever thread took them. Calls take(tensor, sum, or largest value).
template <class Take>
void each_norm(const ak_head& head, const double* partial, bool most, Take take) {
  for (ak_int64 t = 0; t < head.tensors; t++) {
    double all = 0.0;
    for (ak_int64 c = head.first_chunk[t]; c < head.first_chunk[t + 1]; c++)
      all = !most ? all + partial[c] : partial[c] > all || partial[c] != partial[c] ? partial[c] : all;
    take(t, all);
  }
}

AK_PUBLIC int ak_scale(const ak_scale_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (!a->outs != (a->out_dtype == AK_NO_DTYPE) || (a->head.tensors && !a->ins)) return AK_WRONG_VALUE;
  if ((a->norms || a->total) && !a->partial) return AK_WRONG_VALUE;
  if (on_cuda(a->head)) return cuda_scale(*a);
  if (skipped(a->head)) return AK_OK;
  wrong = run(a->head, variant().scale, a);
  if (wrong || !a->partial) return wrong;
  bool most = a->flags & AK_MAX_NORM;
  double total = 0.0;
  each_norm(a->head, a->partial, most, [&](ak_int64 t, double norm) {
    if (a->norms) a->norms[t] = (float)(most ? norm : std::sqrt(norm));
    total = !most ? total + norm : norm > total || norm != norm ? norm : total;
  });
  if (a->total) *a->total = (float)(most ? total : std::sqrt(total));
  return AK_OK;
}

AK_PUBLIC int ak_axpby(const ak_axpby_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (a->head.tensors && (!a->xs || !a->ys || !a->outs)) return AK_WRONG_VALUE;
  wrong = variant().axpby(a, 0, 0);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda_axpby(*a);
  if (skipped(a->head)) return AK_OK;
  return run(a->head, variant().axpby, a);
}

AK_PUBLIC int ak_lamb(const ak_lamb_args* a) {
  int wrong = checked_step(a, variant().lamb, a->exp_avgs && a->exp_avg_sqs);
  if (wrong) return wrong;
  bool trust = a->flags & AK_TRUST;
  if (trust && (!a->partial || !a->ratios)) return AK_WRONG_VALUE;
  if (on_cuda(a->head)) return cuda_lamb(*a);
  if (skipped(a->head)) return AK_OK;
  advance(a->step, a->head.tensors);
  wrong = run(a->head, variant().lamb, a);
  if (wrong || !trust) return wrong;
  for (ak_int64 t = 0; t < a->head.tensors; t++) {
    double values = 0.0, updates = 0.0;
    for (ak_int64 c = a->head.first_chunk[t]; c < a->head.first_chunk[t + 1]; c++)
      values += a->partial[2 * c], updates += a->partial[2 * c + 1];
    a->ratios[t] = trust_ratio(values, updates);
  }
  return run(a->head, variant().lamb_last, a);
}

AK_PUBLIC int ak_novograd(const ak_novograd_args* a) {
  int wrong = checked_step(a, variant().novograd, a->exp_avgs && a->norms && a->partial);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda_novograd(*a);
  if (skipped(a->head)) return AK_OK;
  advance(a->step, a->head.tensors);
  bool most = a->flags & AK_MAX_NORM;
  ak_scale_args measure = {};
  measure.head = a->head, measure.grad_scale = a->grad_scale, measure.ins = a->grads, measure.in_dtype = a->grad_dtype;
  measure.out_dtype = AK_NO_DTYPE, measure.partial = a->partial, measure.flags = a->flags & AK_MAX_NORM;
  wrong = run(a->head, variant().scale, &measure);
  if (wrong) return wrong;
  each_norm(a->head, a->partial, most, [&](ak_int64 t, double norm) {
    *a->norms[t] = novograd_norm(*a, *a->norms[t], most ? norm : std::sqrt(norm));
  });
  return run(a->head, variant().novograd, a);
}

AK_PUBLIC int ak_adam(const ak_adam_args* a) {
  int wrong = checked_step(a, variant().adam, a->exp_avgs && a->exp_avg_sqs);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda_adam(*a);
  if (skipped(a->head)) return AK_OK;
  advance(a->step, a->head.tensors);
  return run(a->head, variant().adam, a);
}

AK_PUBLIC int ak_norm(const ak_norm_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  bool summed = a->grad_weight || a->grad_bias;
  if (a->rows < 0 || a->columns < 0 || a->rows_at_once < 1 || summed != (a->partial != nullptr)) return AK_WRONG_VALUE;
  if (a->rows && a->columns && (!a->grad || !a->in || !a->rstds)) return AK_WRONG_VALUE;
  wrong = variant().norm(a, 0, 0);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda_norm(*a);
  wrong = run_chunks(variant().norm, a, (a->rows + a->rows_at_once - 1) / a->rows_at_once, a->head.threads);
  if (wrong || !summed) return wrong;
  return run_chunks(variant().norm_sums, a, (2 * a->columns + AK_SUMMED - 1) / AK_SUMMED, a->head.threads);
}

AK_PUBLIC int ak_statistics(const ak_statistics_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (a->outer < 0 || a->channels < 0 || a->inner < 1 || a->pieces < 1) return AK_WRONG_VALUE;
  if (a->channels && (!a->partial || !a->means || !a->variances || (a->outer && !a->in))) return AK_WRONG_VALUE;
  wrong = variant().statistics(a, 0, 0);
  if (wrong) return wrong;
  if (on_cuda(a->head)) return cuda_statistics(*a);
  ak_int64 units = a->inner == 1 ? (a->channels + AK_SIDE_BY_SIDE - 1) / AK_SIDE_BY_SIDE : a->channels;
  wrong = run_chunks(variant().statistics, a, units * a->pieces, a->head.threads);
  for (ak_int64 channel = 0; !wrong && channel < a->channels; channel++) {
    Moments all = merged(*a, channel);
    a->means[channel] = mean_of(all), a->variances[channel] = variance_of(all);
  }
  return wrong;
}

AK_PUBLIC int ak_merge(const ak_merge_args* a) {
  int wrong = checked(a->head, sizeof *a);
  if (wrong) return wrong;
  if (a->parts < 0 || a->channels < 0 || !a->mean || !a->variance || !a->count) return AK_WRONG_VALUE;
  if (a->parts && (!a->means || !a->variances || !a->counts)) return AK_WRONG_VALUE;
  if (on_cuda(a->head)) return cuda_merge(*a);
  double count = 0.0;
  for (ak_int64 part = 0; part < a->parts; part++) count += (double)a->counts[part];
  *a->count = (float)count;
  for (ak_int64 channel = 0; channel < a->channels; channel++) {
    Moments all = merged(*a, channel);
    a->mean[channel] = mean_of(all), a->variance[channel] = variance_of(all);
  }
  return AK_OK;
}
