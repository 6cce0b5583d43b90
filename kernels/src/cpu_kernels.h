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
  AdamNumbers c;
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

// -- SGD --

template <class G, class P, class L>
struct SgdBody {
  SgdNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float* buffer;
  typename L::type* half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V p = load<P, ALL>(param + i, n), velocity = {};
    if (buffer && !c.first) velocity = load<F32, ALL>(buffer + i, n);
    sgd<V>(c, load<G, ALL>(grad + i, n), p, buffer ? &velocity : nullptr);
    store<P, ALL>(param + i, p, n);
    if (buffer) store<F32, ALL>(buffer + i, velocity, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class G, class P, class L>
struct SgdChunks {
  const ak_sgd_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    SgdNumbers c = sgd_numbers(a);
    each_vector(count, SgdBody<G, P, L>{
      c, (const typename G::type*)a.grads[t] + begin, (typename P::type*)a.params[t] + begin,
      a.buffers ? a.buffers[t] + begin : nullptr, a.halves ? (typename L::type*)a.halves[t] + begin : nullptr});
  }
};

// -- Adagrad --

template <class G, class P, class L>
struct AdagradBody {
  AdagradNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float* sum;
  typename L::type* half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V p = load<P, ALL>(param + i, n), s = load<F32, ALL>(sum + i, n);
    adagrad<V>(c, load<G, ALL>(grad + i, n), p, s);
    store<P, ALL>(param + i, p, n);
    store<F32, ALL>(sum + i, s, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class G, class P, class L>
struct AdagradChunks {
  const ak_adagrad_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    AdagradNumbers c = adagrad_numbers(a);
    each_vector(count, AdagradBody<G, P, L>{
      c, (const typename G::type*)a.grads[t] + begin, (typename P::type*)a.params[t] + begin, a.sums[t] + begin,
      a.halves ? (typename L::type*)a.halves[t] + begin : nullptr});
  }
};

// -- scale, check and norms --

template <class I, class O>
struct ScaleBody {
  float factor;
  const typename I::type* in;
  typename O::type* out;
  V& squares;
  U& bad;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V x = load<I, ALL>(in + i, n) * factor;
    squares += x * x;
    // Of inf and nan the difference is nan.
    bad |= (U)(x - x != (V){});
    store<O, ALL>(out + i, x, n);
  }
};

template <class I, class O>
struct ScaleChunks {
  const ak_scale_args& a;

  void run(ak_int64 t, ak_int64 chunk, ak_int64 begin, ak_int64 count) {
    float factor = gradient_factor(a.grad_scale);
    U bad = {};
    double sum = 0.0;
    // A sum of few squares in fp32 at a time: each lane takes 128 of them.
    for (ak_int64 from = 0; from < count; from += 128 * 16) {
      ak_int64 left = count - from, some = left < 128 * 16 ? left : 128 * 16;
      V squares = {};
      each_vector(some, ScaleBody<I, O>{
        factor, (const typename I::type*)a.ins[t] + begin + from,
        a.outs ? (typename O::type*)a.outs[t] + begin + from : nullptr, squares, bad});
      for (int lane = 0; lane < AK_LANES; lane++) sum += (double)squares[lane];
    }
    if (a.partial) a.partial[chunk] = sum;
    ak_uint32 any = 0;
    for (int lane = 0; lane < AK_LANES; lane++) any |= bad[lane];
    // Several threads may write the same 1.
    if (any && a.found) __atomic_store_n((ak_uint32*)a.found, 0x3f800000u, __ATOMIC_RELAXED);
  }
};

template <class I>
int for_outs(const ak_scale_args& a, ak_int64 from, ak_int64 to) {
#define AK_TRY(OUT, O)                   \
  if (a.out_dtype == OUT) {              \
    ScaleChunks<I, O> op{a};             \
    each_chunk(a.head, from, to, op);    \
    return AK_OK;                        \
  }
  AK_TRY(AK_NO_DTYPE, Nothing)
  AK_TRY(AK_F32, F32)
  AK_TRY(AK_BF16, BF16)
  AK_TRY(AK_F16, F16)
#undef AK_TRY
  return AK_WRONG_DTYPE;
}

int scale(const void* args, ak_int64 from, ak_int64 to) {
  const ak_scale_args& a = *(const ak_scale_args*)args;
  switch (a.in_dtype) {
    case AK_F32: return for_outs<F32>(a, from, to);
    case AK_F16: return for_outs<F16>(a, from, to);
    case AK_BF16: return for_outs<BF16>(a, from, to);
  }
  return AK_WRONG_DTYPE;
}

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
  for_dtypes<SgdChunks, ak_sgd_args>,
  for_dtypes<AdagradChunks, ak_adagrad_args>,
  scale,
};
