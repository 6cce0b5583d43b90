// The kernels of one CPU variant. A variant's source defines AK_LANES and AK_VARIANT and includes this file.
#include "function.h"
#include "variant.h"

namespace {

#include "vectors.h"
// After the vectors, whose functions it calls.
#include "functors.h"

// Calls op.run(tensor, first element, elements) for each chunk of [from, to).
template <class Op>
void each_chunk(const ak_head& head, ak_int64 from, ak_int64 to, Op& op) {
  ak_int64 low = 0, high = head.tensors;  // the last tensor whose first chunk is not behind `from`
  while (high - low > 1) {
    ak_int64 middle = low + (high - low) / 2;
    if (head.first_chunk[middle] <= from) low = middle;
    else high = middle;
  }
  ak_int64 tensor = low;
  for (ak_int64 chunk = from; chunk < to; chunk++) {
    while (head.first_chunk[tensor + 1] <= chunk) tensor++;
    ak_int64 begin = (chunk - head.first_chunk[tensor]) * AK_CHUNK, left = head.counts[tensor] - begin;
    op.run(tensor, chunk, begin, left < AK_CHUNK ? left : AK_CHUNK);
  }
}

// -- Adam --

template <class G, class P, class L>
struct AdamBody {
  const AdamNumbers& c;
  const typename G::type* grad;
  typename P::type* param;
  float *m, *v, *most;
  typename L::type* half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V g = load<G, ALL>(grad + i, n), p = load<P, ALL>(param + i, n);
    V first = load<F32, ALL>(m + i, n), second = load<F32, ALL>(v + i, n), top = {};
    if (most) top = load<F32, ALL>(most + i, n);
    adam<V>(c, g, p, first, second, most ? &top : nullptr);
    store<P, ALL>(param + i, p, n);
    store<F32, ALL>(m + i, first, n);
    store<F32, ALL>(v + i, second, n);
    if (most) store<F32, ALL>(most + i, top, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class G, class P, class L>
struct AdamChunks {
  const ak_adam_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    AdamNumbers c = adam_numbers(a, t);
    each_vector(count, AdamBody<G, P, L>{
      c, (const typename G::type*)a.grads[t] + begin, (typename P::type*)a.params[t] + begin,
      a.exp_avgs[t] + begin, a.exp_avg_sqs[t] + begin,
      a.max_exp_avg_sqs ? a.max_exp_avg_sqs[t] + begin : nullptr,
      a.halves ? (typename L::type*)a.halves[t] + begin : nullptr});
  }
};

// Picks Chunks<G, P, L> by the dtypes of gradients, parameters and half copies. Parameters in half precision have none.
template <template <class, class, class> class Chunks, class Args, class G>
int for_params(const Args& a, ak_int64 from, ak_int64 to) {
#define AK_TRY(PARAM, P, HALF, L)                            \
  if (a.param_dtype == PARAM && a.half_dtype == HALF) {      \
    Chunks<G, P, L> op{a};                                   \
    each_chunk(a.head, from, to, op);                        \
    return AK_OK;                                            \
  }
  AK_TRY(AK_F32, F32, AK_NO_DTYPE, Nothing)
  AK_TRY(AK_F32, F32, AK_BF16, BF16)
  AK_TRY(AK_F32, F32, AK_F16, F16)
  AK_TRY(AK_BF16, BF16, AK_NO_DTYPE, Nothing)
  AK_TRY(AK_F16, F16, AK_NO_DTYPE, Nothing)
#undef AK_TRY
  return AK_WRONG_DTYPE;
}

template <template <class, class, class> class Chunks, class Args>
int for_dtypes(const void* args, ak_int64 from, ak_int64 to) {
  const Args& a = *(const Args*)args;
  switch (a.grad_dtype) {
    case AK_F32: return for_params<Chunks, Args, F32>(a, from, to);
    case AK_F16: return for_params<Chunks, Args, F16>(a, from, to);
    case AK_BF16: return for_params<Chunks, Args, BF16>(a, from, to);
  }
  return AK_WRONG_DTYPE;
}

}  // namespace

#define AK_NAME_OF(name) #name
#define AK_NAME(name) AK_NAME_OF(name)
#define AK_GLUE(prefix, name) prefix##name
#define AK_SYMBOL(prefix, name) AK_GLUE(prefix, name)

extern const Variant AK_SYMBOL(ak_, AK_VARIANT) = {
  AK_NAME(AK_VARIANT),
  for_dtypes<AdamChunks, ak_adam_args>,
};
