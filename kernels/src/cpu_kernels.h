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

// -- LAMB --

// Sums of squares in fp32 by 16 lanes, however long a vector is, so that all variants add in the same order. Each lane
// takes 128 squares at most, and sums of those are in fp64.
struct Squares {
  V lanes[16 / AK_LANES];

  template <bool ALL>
  __attribute__((always_inline)) inline void add(ak_int64 i, V x, ak_int64 n) {
    if (!ALL) x = first_lanes(x, n);
    lanes[i / AK_LANES % (16 / AK_LANES)] += x * x;
  }

  double sum() const {
    double all = 0.0;
    for (int i = 0; i < 16; i++) all += (double)lanes[i / AK_LANES][i % AK_LANES];
    return all;
  }
};

const ak_int64 BLOCK = 128 * 16;

template <class G, class P, class L>
struct LambBody {
  LambNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float *m, *v;
  typename L::type* half;
  Squares &values, &updates;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V p = load<P, ALL>(param + i, n), first = load<F32, ALL>(m + i, n), second = load<F32, ALL>(v + i, n);
    V update = lamb<V>(c, load<G, ALL>(grad + i, n), p, first, second);
    store<F32, ALL>(m + i, first, n);
    store<F32, ALL>(v + i, second, n);
    if (c.trust) {
      values.template add<ALL>(i, p, n);
      updates.template add<ALL>(i, update, n);
      return;
    }
    p = p - c.lr * update;
    store<P, ALL>(param + i, p, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class G, class P, class L>
struct LambChunks {
  const ak_lamb_args& a;

  void run(ak_int64 t, ak_int64 chunk, ak_int64 begin, ak_int64 count) {
    LambNumbers c = lamb_numbers(a, t);
    double sums[2] = {0.0, 0.0};
    for (ak_int64 from = 0; from < count; from += BLOCK) {
      ak_int64 left = count - from, at = begin + from;
      Squares values = {}, updates = {};
      each_vector(left < BLOCK ? left : BLOCK, LambBody<G, P, L>{
        c, (const typename G::type*)a.grads[t] + at, (typename P::type*)a.params[t] + at, a.exp_avgs[t] + at,
        a.exp_avg_sqs[t] + at, a.halves ? (typename L::type*)a.halves[t] + at : nullptr, values, updates});
      if (c.trust) sums[0] += values.sum(), sums[1] += updates.sum();
    }
    if (c.trust) a.partial[2 * chunk] = sums[0], a.partial[2 * chunk + 1] = sums[1];
  }
};

// The second pass, where the averages are those of this step.
template <class P, class L>
struct LambLastBody {
  LambNumbers c;
  typename P::type* param;
  const float *m, *v;
  typename L::type* half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V p = load<P, ALL>(param + i, n);
    p = p - c.lr * lamb_update<V>(c, p, load<F32, ALL>(m + i, n), load<F32, ALL>(v + i, n));
    store<P, ALL>(param + i, p, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class, class P, class L>
struct LambLastChunks {
  const ak_lamb_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    LambNumbers c = lamb_numbers(a, t);
    c.lr *= a.ratios[t];
    each_vector(count, LambLastBody<P, L>{
      c, (typename P::type*)a.params[t] + begin, a.exp_avgs[t] + begin, a.exp_avg_sqs[t] + begin,
      a.halves ? (typename L::type*)a.halves[t] + begin : nullptr});
  }
};

// -- NovoGrad --

template <class G, class P, class L>
struct NovogradBody {
  NovogradNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float* m;
  typename L::type* half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V p = load<P, ALL>(param + i, n), first = load<F32, ALL>(m + i, n);
    novograd<V>(c, load<G, ALL>(grad + i, n), p, first);
    store<P, ALL>(param + i, p, n);
    store<F32, ALL>(m + i, first, n);
    store<L, ALL>(half + i, p, n);
  }
};

template <class G, class P, class L>
struct NovogradChunks {
  const ak_novograd_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    NovogradNumbers c = novograd_numbers(a, t);
    each_vector(count, NovogradBody<G, P, L>{
      c, (const typename G::type*)a.grads[t] + begin, (typename P::type*)a.params[t] + begin, a.exp_avgs[t] + begin,
      a.halves ? (typename L::type*)a.halves[t] + begin : nullptr});
  }
};

// -- scale, check and norms --

// Several threads may write the same 1.
inline void tell(U bad, float* found) {
  ak_uint32 any = 0;
  for (int lane = 0; lane < AK_LANES; lane++) any |= bad[lane];
  if (any && found) __atomic_store_n((ak_uint32*)found, 0x3f800000u, __ATOMIC_RELAXED);
}

// All ones where x is inf or nan: their difference is nan.
AK_FN U not_finite(V x) { return (U)(x - x != (V){}); }

template <class I, class O, bool MOST>
struct ScaleBody {
  float factor;
  const typename I::type* in;
  typename O::type* out;
  Squares& squares;
  V& most;
  U& bad;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V x = load<I, ALL>(in + i, n);
    bad |= not_finite(x);
    x = x * factor;
    if (MOST) most = larger(magnitude(x), most);
    // The lanes behind the last hold 0.
    else squares.template add<true>(i, x, n);
    store<O, ALL>(out + i, x, n);
  }
};

template <class I, class O, bool MOST>
struct ScaleChunks {
  const ak_scale_args& a;

  void run(ak_int64 t, ak_int64 chunk, ak_int64 begin, ak_int64 count) {
    float factor = gradient_factor(a.grad_scale);
    U bad = {};
    V most = {};
    double sum = 0.0;
    for (ak_int64 from = 0; from < count; from += BLOCK) {
      ak_int64 left = count - from;
      Squares squares = {};
      each_vector(left < BLOCK ? left : BLOCK, ScaleBody<I, O, MOST>{
        factor, (const typename I::type*)a.ins[t] + begin + from,
        a.outs ? (typename O::type*)a.outs[t] + begin + from : nullptr, squares, most, bad});
      if (!MOST) sum += squares.sum();
    }
    for (int lane = 0; MOST && lane < AK_LANES; lane++) {
      double one = (double)most[lane];
      if (one > sum || one != one) sum = one;
    }
    if (a.partial) a.partial[chunk] = sum;
    tell(bad, a.found);
  }
};

template <class I>
int for_outs(const ak_scale_args& a, ak_int64 from, ak_int64 to) {
#define AK_TRY(OUT, O)                   \
  if (a.out_dtype == OUT) {              \
    if (a.flags & AK_MAX_NORM) {         \
      ScaleChunks<I, O, true> op{a};     \
      each_chunk(a.head, from, to, op);  \
    } else {                             \
      ScaleChunks<I, O, false> op{a};    \
      each_chunk(a.head, from, to, op);  \
    }                                    \
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

// -- axpby --

template <class X, class Y, class O>
struct AxpbyBody {
  float a, b;
  U check_x, check_y;
  const typename X::type* x;
  const typename Y::type* y;
  typename O::type* out;
  U& bad;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) const {
    V one = load<X, ALL>(x + i, n), other = load<Y, ALL>(y + i, n);
    bad |= (not_finite(one) & check_x) | (not_finite(other) & check_y);
    store<O, ALL>(out + i, a * one + b * other, n);
  }
};

template <class X, class Y, class O>
struct AxpbyChunks {
  const ak_axpby_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    U bad = {}, all = ~(U){};
    each_vector(count, AxpbyBody<X, Y, O>{
      gradient_factor(a.x_scale), (float)a.b, a.flags & AK_CHECK_X ? all : U{}, a.flags & AK_CHECK_Y ? all : U{},
      (const typename X::type*)a.xs[t] + begin, (const typename Y::type*)a.ys[t] + begin,
      (typename O::type*)a.outs[t] + begin, bad});
    tell(bad, a.found);
  }
};

template <class X, class Y>
int axpby_outs(const ak_axpby_args& a, ak_int64 from, ak_int64 to) {
#define AK_TRY(OUT, O)                 \
  if (a.out_dtype == OUT) {            \
    AxpbyChunks<X, Y, O> op{a};        \
    each_chunk(a.head, from, to, op);  \
    return AK_OK;                      \
  }
  AK_TRY(AK_F32, F32)
  AK_TRY(AK_BF16, BF16)
  AK_TRY(AK_F16, F16)
#undef AK_TRY
  return AK_WRONG_DTYPE;
}

template <class X>
int axpby_ys(const ak_axpby_args& a, ak_int64 from, ak_int64 to) {
  switch (a.y_dtype) {
    case AK_F32: return axpby_outs<X, F32>(a, from, to);
    case AK_F16: return axpby_outs<X, F16>(a, from, to);
    case AK_BF16: return axpby_outs<X, BF16>(a, from, to);
  }
  return AK_WRONG_DTYPE;
}

int axpby(const void* args, ak_int64 from, ak_int64 to) {
  const ak_axpby_args& a = *(const ak_axpby_args*)args;
  switch (a.x_dtype) {
    case AK_F32: return axpby_ys<F32>(a, from, to);
    case AK_F16: return axpby_ys<F16>(a, from, to);
    case AK_BF16: return axpby_ys<BF16>(a, from, to);
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

int lamb_last(const void* args, ak_int64 from, ak_int64 to) {
  return for_params<LambLastChunks, ak_lamb_args, Nothing>(*(const ak_lamb_args*)args, from, to);
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
  for_dtypes<LambChunks, ak_lamb_args>,
  lamb_last,
  for_dtypes<NovogradChunks, ak_novograd_args>,
  axpby,
  scale,
};
