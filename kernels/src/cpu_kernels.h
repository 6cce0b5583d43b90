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

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct AdamBody {
  AdamNumbers c;
  Elements<G> grad;
  Elements<P> param;
  float *m, *v, *most;
  Elements<L> half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V g = load<ALL>(grad, i, n), p = load<ALL>(param, i, n);
    V first = load<ALL>(m, i, n), second = load<ALL>(v, i, n), top = {};
    if (most) top = load<ALL>(most, i, n);
    adam<V>(c, g, p, first, second, most ? &top : nullptr);
    store<ALL>(param, i, p, n);
    store<ALL>(m, i, first, n);
    store<ALL>(v, i, second, n);
    if (most) store<ALL>(most, i, top, n);
    store<ALL>(half, i, p, n);
  }
};

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct AdamChunks {
  const ak_adam_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    AdamNumbers c = adam_numbers(a, t);
    each_vector(count, AdamBody<G, P, L>{
      c, Elements<G>(a.grads[t], a.grad_dtype, begin), Elements<P>(a.params[t], a.param_dtype, begin),
      a.exp_avgs[t] + begin, a.exp_avg_sqs[t] + begin,
      a.max_exp_avg_sqs ? a.max_exp_avg_sqs[t] + begin : nullptr,
      Elements<L>(a.halves ? a.halves[t] : nullptr, a.half_dtype, begin)});
  }
};

// -- SGD --

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct SgdBody {
  SgdNumbers c;
  Elements<G> grad;
  Elements<P> param;
  float* buffer;
  Elements<L> half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V p = load<ALL>(param, i, n), velocity = {};
    if (buffer && !c.first) velocity = load<ALL>(buffer, i, n);
    sgd<V>(c, load<ALL>(grad, i, n), p, buffer ? &velocity : nullptr);
    store<ALL>(param, i, p, n);
    if (buffer) store<ALL>(buffer, i, velocity, n);
    store<ALL>(half, i, p, n);
  }
};

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct SgdChunks {
  const ak_sgd_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    SgdNumbers c = sgd_numbers(a);
    each_vector(count, SgdBody<G, P, L>{
      c, Elements<G>(a.grads[t], a.grad_dtype, begin), Elements<P>(a.params[t], a.param_dtype, begin),
      a.buffers ? a.buffers[t] + begin : nullptr, Elements<L>(a.halves ? a.halves[t] : nullptr, a.half_dtype, begin)});
  }
};

// -- Adagrad --

// A step with one state for each element, Adagrad's or NovoGrad's.
template <class Numbers, ak_int32 G, ak_int32 P, ak_int32 L>
struct OneStateBody {
  Numbers c;
  Elements<G> grad;
  Elements<P> param;
  float* state;
  Elements<L> half;

  template <class Args>
  OneStateBody(const Numbers& numbers, const Args& a, ak_int64 t, float* first, ak_int64 begin)
      : c(numbers), grad(a.grads[t], a.grad_dtype, begin), param(a.params[t], a.param_dtype, begin),
        state(first + begin), half(a.halves ? a.halves[t] : nullptr, a.half_dtype, begin) {}

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V p = load<ALL>(param, i, n), s = load<ALL>(state, i, n);
    one_state_step<V>(c, load<ALL>(grad, i, n), p, s);
    store<ALL>(param, i, p, n);
    store<ALL>(state, i, s, n);
    store<ALL>(half, i, p, n);
  }
};

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct AdagradChunks {
  const ak_adagrad_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    each_vector(count, OneStateBody<AdagradNumbers, G, P, L>(adagrad_numbers(a), a, t, a.sums[t], begin));
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
    lanes[(i & 15) / AK_LANES] += x * x;
  }

  double sum() const {
    double all = 0.0;
    for (int i = 0; i < 16; i++) all += (double)lanes[i / AK_LANES][i % AK_LANES];
    return all;
  }
};

const ak_int64 BLOCK = 128 * 16;

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct LambBody {
  LambNumbers c;
  Elements<G> grad;
  Elements<P> param;
  float *m, *v;
  Elements<L> half;
  Squares values, updates;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V p = load<ALL>(param, i, n), first = load<ALL>(m, i, n), second = load<ALL>(v, i, n);
    V update = lamb<V>(c, load<ALL>(grad, i, n), p, first, second);
    store<ALL>(m, i, first, n);
    store<ALL>(v, i, second, n);
    if (c.trust) {
      values.template add<ALL>(i, p, n);
      updates.template add<ALL>(i, update, n);
      return;
    }
    p = p - c.lr * update;
    store<ALL>(param, i, p, n);
    store<ALL>(half, i, p, n);
  }
};

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct LambChunks {
  const ak_lamb_args& a;

  void run(ak_int64 t, ak_int64 chunk, ak_int64 begin, ak_int64 count) {
    LambNumbers c = lamb_numbers(a, t);
    double sums[2] = {0.0, 0.0};
    for (ak_int64 from = 0; from < count; from += BLOCK) {
      ak_int64 left = count - from, at = begin + from;
      LambBody<G, P, L> done = each_vector(left < BLOCK ? left : BLOCK, LambBody<G, P, L>{
        c, Elements<G>(a.grads[t], a.grad_dtype, at), Elements<P>(a.params[t], a.param_dtype, at), a.exp_avgs[t] + at,
        a.exp_avg_sqs[t] + at, Elements<L>(a.halves ? a.halves[t] : nullptr, a.half_dtype, at), {}, {}});
      if (c.trust) sums[0] += done.values.sum(), sums[1] += done.updates.sum();
    }
    if (c.trust) a.partial[2 * chunk] = sums[0], a.partial[2 * chunk + 1] = sums[1];
  }
};

// The second pass, where the averages are those of this step.
template <ak_int32 G, ak_int32 P, ak_int32 L>
struct LambLastBody {
  LambNumbers c;
  Elements<P> param;
  const float *m, *v;
  Elements<L> half;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V p = load<ALL>(param, i, n);
    p = p - c.lr * lamb_update<V>(c, p, load<ALL>(m, i, n), load<ALL>(v, i, n));
    store<ALL>(param, i, p, n);
    store<ALL>(half, i, p, n);
  }
};

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct LambLastChunks {
  const ak_lamb_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    LambNumbers c = lamb_numbers(a, t);
    c.lr *= a.ratios[t];
    each_vector(count, LambLastBody<G, P, L>{
      c, Elements<P>(a.params[t], a.param_dtype, begin), a.exp_avgs[t] + begin, a.exp_avg_sqs[t] + begin,
      Elements<L>(a.halves ? a.halves[t] : nullptr, a.half_dtype, begin)});
  }
};

// -- NovoGrad --

template <ak_int32 G, ak_int32 P, ak_int32 L>
struct NovogradChunks {
  const ak_novograd_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    each_vector(count, OneStateBody<NovogradNumbers, G, P, L>(novograd_numbers(a, t), a, t, a.exp_avgs[t], begin));
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

template <ak_int32 I, ak_int32 O, bool MOST>
struct ScaleBody {
  float factor;
  Elements<I> in;
  Elements<O> out;
  Squares squares;
  V most;
  U bad;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V x = load<ALL>(in, i, n);
    bad |= not_finite(x);
    x = x * factor;
    if (MOST) most = larger(magnitude(x), most);
    // The lanes behind the last hold 0.
    else squares.template add<true>(i, x, n);
    store<ALL>(out, i, x, n);
  }
};

template <ak_int32 I, ak_int32 O, bool MOST>
struct ScaleChunks {
  const ak_scale_args& a;

  void run(ak_int64 t, ak_int64 chunk, ak_int64 begin, ak_int64 count) {
    float factor = gradient_factor(a.grad_scale);
    U bad = {};
    V most = {};
    double sum = 0.0;
    for (ak_int64 from = 0; from < count; from += BLOCK) {
      ak_int64 left = count - from, at = begin + from;
      ScaleBody<I, O, MOST> done = each_vector(left < BLOCK ? left : BLOCK, ScaleBody<I, O, MOST>{
        factor, Elements<I>(a.ins[t], a.in_dtype, at), Elements<O>(a.outs ? a.outs[t] : nullptr, a.out_dtype, at), {},
        most, bad});
      most = done.most, bad = done.bad;
      if (!MOST) sum += done.squares.sum();
    }
    for (int lane = 0; MOST && lane < AK_LANES; lane++) {
      double one = (double)most[lane];
      if (one > sum || one != one) sum = one;
    }
    if (a.partial) a.partial[chunk] = sum;
    tell(bad, a.found);
  }
};

bool is_float(ak_int32 dtype) { return dtype == AK_F32 || dtype == AK_F16 || dtype == AK_BF16; }

template <class Chunks, class Args>
int each_chunk_by(const Args& a, ak_int64 from, ak_int64 to) {
  Chunks op{a};
  each_chunk(a.head, from, to, op);
  return AK_OK;
}

// Widening, in place, and reading alone.
int scale(const void* args, ak_int64 from, ak_int64 to) {
  const ak_scale_args& a = *(const ak_scale_args*)args;
  ak_int32 in = a.in_dtype, out = a.out_dtype;
  if (!is_float(in) || !(is_float(out) || out == AK_NO_DTYPE)) return AK_WRONG_DTYPE;
  if (a.flags & AK_MAX_NORM) return each_chunk_by<ScaleChunks<AK_ANY, AK_ANY, true>>(a, from, to);
#define AK_TRY(IN, OUT) \
  if (in == IN && out == OUT) return each_chunk_by<ScaleChunks<IN, OUT, false>>(a, from, to);
  AK_TRY(AK_F32, AK_F32)
  AK_TRY(AK_F32, AK_NO_DTYPE)
  AK_TRY(AK_BF16, AK_F32)
  AK_TRY(AK_BF16, AK_BF16)
  AK_TRY(AK_BF16, AK_NO_DTYPE)
  AK_TRY(AK_F16, AK_F32)
  AK_TRY(AK_F16, AK_F16)
  AK_TRY(AK_F16, AK_NO_DTYPE)
#undef AK_TRY
  return each_chunk_by<ScaleChunks<AK_ANY, AK_ANY, false>>(a, from, to);
}

// -- axpby --

template <ak_int32 X, ak_int32 Y, ak_int32 O>
struct AxpbyBody {
  float a, b;
  U check_x, check_y;
  Elements<X> x;
  Elements<Y> y;
  Elements<O> out;
  U bad;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V one = load<ALL>(x, i, n), other = load<ALL>(y, i, n);
    bad |= (not_finite(one) & check_x) | (not_finite(other) & check_y);
    store<ALL>(out, i, a * one + b * other, n);
  }
};

template <ak_int32 X, ak_int32 Y, ak_int32 O>
struct AxpbyChunks {
  const ak_axpby_args& a;

  void run(ak_int64 t, ak_int64, ak_int64 begin, ak_int64 count) {
    U all = ~(U){};
    AxpbyBody<X, Y, O> done = each_vector(count, AxpbyBody<X, Y, O>{
      gradient_factor(a.x_scale), (float)a.b, a.flags & AK_CHECK_X ? all : U{}, a.flags & AK_CHECK_Y ? all : U{},
      Elements<X>(a.xs[t], a.x_dtype, begin), Elements<Y>(a.ys[t], a.y_dtype, begin),
      Elements<O>(a.outs[t], a.out_dtype, begin), {}});
    tell(done.bad, a.found);
  }
};

// All of fp32, and half gradients added to fp32 ones.
int axpby(const void* args, ak_int64 from, ak_int64 to) {
  const ak_axpby_args& a = *(const ak_axpby_args*)args;
  ak_int32 x = a.x_dtype, y = a.y_dtype, out = a.out_dtype;
  if (!is_float(x) || !is_float(y) || !is_float(out)) return AK_WRONG_DTYPE;
  if (y == AK_F32 && out == AK_F32) {
    if (x == AK_F32) return each_chunk_by<AxpbyChunks<AK_F32, AK_F32, AK_F32>>(a, from, to);
    if (x == AK_BF16) return each_chunk_by<AxpbyChunks<AK_BF16, AK_F32, AK_F32>>(a, from, to);
    return each_chunk_by<AxpbyChunks<AK_F16, AK_F32, AK_F32>>(a, from, to);
  }
  return each_chunk_by<AxpbyChunks<AK_ANY, AK_ANY, AK_ANY>>(a, from, to);
}

// -- What all optimizers' steps have in common --

bool right_dtypes(ak_int32 grad, ak_int32 param, ak_int32 half) {
  if (!is_float(grad) || !is_float(param)) return false;
  // Parameters in half precision have no half copies.
  return half == AK_NO_DTYPE || (param == AK_F32 && (half == AK_F16 || half == AK_BF16));
}

// fp32 training, gradients and half copies of one dtype, and bf16 alone.
template <template <ak_int32, ak_int32, ak_int32> class Chunks, class Args>
int step(const void* args, ak_int64 from, ak_int64 to) {
  const Args& a = *(const Args*)args;
  ak_int32 grad = a.grad_dtype, param = a.param_dtype, half = a.half_dtype;
  if (!right_dtypes(grad, param, half)) return AK_WRONG_DTYPE;
#define AK_TRY(GRAD, PARAM, HALF)                        \
  if (grad == GRAD && param == PARAM && half == HALF)    \
    return each_chunk_by<Chunks<GRAD, PARAM, HALF>>(a, from, to);
  AK_TRY(AK_F32, AK_F32, AK_NO_DTYPE)
  AK_TRY(AK_BF16, AK_F32, AK_BF16)
  AK_TRY(AK_F16, AK_F32, AK_F16)
  AK_TRY(AK_BF16, AK_BF16, AK_NO_DTYPE)
#undef AK_TRY
  return each_chunk_by<Chunks<AK_ANY, AK_ANY, AK_ANY>>(a, from, to);
}

// Reads no gradients.
int lamb_last(const void* args, ak_int64 from, ak_int64 to) {
  return each_chunk_by<LambLastChunks<AK_NO_DTYPE, AK_ANY, AK_ANY>>(*(const ak_lamb_args*)args, from, to);
}

#include "cpu_norms.h"

}  // namespace

#define AK_NAME_OF(name) #name
#define AK_NAME(name) AK_NAME_OF(name)
#define AK_GLUE(prefix, name) prefix##name
#define AK_SYMBOL(prefix, name) AK_GLUE(prefix, name)

extern const Variant AK_SYMBOL(ak_, AK_VARIANT) = {
  AK_NAME(AK_VARIANT),
  step<AdamChunks, ak_adam_args>,
  step<SgdChunks, ak_sgd_args>,
  step<AdagradChunks, ak_adagrad_args>,
  step<LambChunks, ak_lamb_args>,
  lamb_last,
  step<NovogradChunks, ak_novograd_args>,
  axpby,
  scale,
  norm,
  norm_sums,
  statistics,
};
