// The CUDA kernels, for nvcc and for NVRTC: multi-tensor apply around the functors. Includes nothing of the toolkit.
//
// A block does AK_CUDA_PART elements of one tensor. Where all pointers of its tensor are aligned, a thread moves four
// elements at a time: 16 bytes of fp32, 8 of half precision. Reductions go in an order that depends on sizes alone.
#include "cuda_table.h"
#include "functors.h"

#define AK_LANES 4
#define AK_GLOBAL extern "C" __global__ void __launch_bounds__(AK_CUDA_THREADS)
// A kernel's one parameter, which stays where the launch has put it.
#if !defined(AK_LAUNCHED)
#define AK_LAUNCHED(TYPE) const __grid_constant__ TYPE launch
#endif

#if !defined(AK_EMULATED)
AK_FN float half_to_float(ak_uint16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

AK_FN ak_uint16 float_to_half(float x) {
  ak_uint16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
#endif

AK_FN float from_bf16(ak_uint16 h) { return __uint_as_float((ak_uint32)h << 16); }

// As on a CPU, so that all builds give the same bits.
AK_FN ak_uint16 to_bf16(float x) {
  ak_uint32 bits = __float_as_uint(x);
  if (x != x) return (ak_uint16)((bits | 0x400000u) >> 16);
  return (ak_uint16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Elements of one dtype: read and written N at a time, where N is 1 or AK_LANES.
struct F32 {
  typedef float type;
  static AK_FN void load(const float* from, float (&x)[1]) { x[0] = *from; }
  static AK_FN void load(const float* from, float (&x)[4]) {
    float4 q = *(const float4*)from;
    x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
  }
  static AK_FN void store(float* to, const float (&x)[1]) { *to = x[0]; }
  static AK_FN void store(float* to, const float (&x)[4]) { *(float4*)to = make_float4(x[0], x[1], x[2], x[3]); }
};

template <class Convert>
struct Half {
  typedef ak_uint16 type;
  static AK_FN void load(const ak_uint16* from, float (&x)[1]) { x[0] = Convert::wide(*from); }
  static AK_FN void load(const ak_uint16* from, float (&x)[4]) {
    ushort4 q = *(const ushort4*)from;
    x[0] = Convert::wide(q.x), x[1] = Convert::wide(q.y), x[2] = Convert::wide(q.z), x[3] = Convert::wide(q.w);
  }
  static AK_FN void store(ak_uint16* to, const float (&x)[1]) { *to = Convert::narrow(x[0]); }
  static AK_FN void store(ak_uint16* to, const float (&x)[4]) {
    *(ushort4*)to =
        make_ushort4(Convert::narrow(x[0]), Convert::narrow(x[1]), Convert::narrow(x[2]), Convert::narrow(x[3]));
  }
};

struct ConvertF16 {
  static AK_FN float wide(ak_uint16 h) { return half_to_float(h); }
  static AK_FN ak_uint16 narrow(float x) { return float_to_half(x); }
};

struct ConvertBF16 {
  static AK_FN float wide(ak_uint16 h) { return from_bf16(h); }
  static AK_FN ak_uint16 narrow(float x) { return to_bf16(x); }
};

typedef Half<ConvertF16> F16;
typedef Half<ConvertBF16> BF16;

// Nothing is written.
struct Nothing {
  typedef float type;
  template <int N>
  static AK_FN void store(float*, const float (&)[N]) {}
};

// Where a block works: a row of the table, and elements [begin, begin + count) of its tensor.
struct Place {
  ak_int32 row;
  ak_int64 begin;
  ak_int32 count;
};

template <class Launch>
AK_FN Place place_of_block(const Launch& launch) {
  ak_int32 low = 0, high = launch.rows;  // the last row whose first block is not behind this one
  while (high - low > 1) {
    ak_int32 middle = (low + high) / 2;
    if (launch.first_block[middle] <= blockIdx.x) low = middle;
    else high = middle;
  }
  ak_int64 begin = (ak_int64)(blockIdx.x - launch.first_block[low]) * AK_CUDA_PART;
  ak_int64 left = launch.counts[low] - begin;
  return Place{low, begin, (ak_int32)(left < AK_CUDA_PART ? left : AK_CUDA_PART)};
}

template <class E, class Launch>
AK_FN typename E::type* column(const Launch& launch, int name, const Place& place) {
  return (typename E::type*)launch.pointers[name][place.row] + place.begin;
}

// Tells whether groups of AK_LANES elements begin at a pointer; NULL does no harm.
template <class E>
AK_FN bool aligned(const typename E::type* at) {
  return ((unsigned long long)at & (AK_LANES * sizeof(typename E::type) - 1)) == 0;
}

AK_FN bool skipped(const float* found_inf) { return found_inf && *found_inf != 0.0f; }

// Calls body.at<N>(i) for elements [0, count), by all threads of the block.
template <class Body>
AK_FN void each_element(ak_int32 count, bool in_groups, Body& body) {
  ak_int32 groups = in_groups ? count / AK_LANES : 0;
  for (ak_int32 i = threadIdx.x; i < groups; i += blockDim.x) body.template at<AK_LANES>(i * AK_LANES);
  for (ak_int32 i = groups * AK_LANES + threadIdx.x; i < count; i += blockDim.x) body.template at<1>(i);
}

// A copy of the arguments in which a tensor's own count of steps is the count.
template <class Launch>
AK_FN auto args_of_row(const Launch& launch, int steps, ak_int32 row) -> decltype(launch.args) {
  auto args = launch.args;
  args.step.each = nullptr;
  if (launch.args.step.each) args.step.one = launch.pointers[steps][row], args.step.dtype = AK_F32;
  return args;
}

// -- Adam --

template <class G, class P, class L>
struct AdamBody {
  AdamNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float *m, *v, *most;
  typename L::type* half;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float g[N], p[N], first[N], second[N], top[N];
    G::load(grad + i, g), P::load(param + i, p), F32::load(m + i, first), F32::load(v + i, second);
    if (most) F32::load(most + i, top);
#pragma unroll
    for (int j = 0; j < N; j++) adam<float>(c, g[j], p[j], first[j], second[j], most ? &top[j] : nullptr);
    P::store(param + i, p), F32::store(m + i, first), F32::store(v + i, second);
    if (most) F32::store(most + i, top);
    L::store(half + i, p);
  }
};

template <class G, class P, class L>
AK_FN void adam_block(const ak_adam_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  __shared__ AdamNumbers numbers;
  if (threadIdx.x == 0) {
    numbers = adam_numbers(args_of_row(launch, AK_ADAM_STEPS, place.row), place.row);
  }
  __syncthreads();
  AdamBody<G, P, L> body = {
    numbers, column<G>(launch, AK_GRADS, place), column<P>(launch, AK_PARAMS, place),
    column<F32>(launch, AK_STATE1, place), column<F32>(launch, AK_STATE2, place),
    launch.args.max_exp_avg_sqs ? column<F32>(launch, AK_STATE3, place) : nullptr,
    column<L>(launch, AK_HALVES, place)};
  bool in_groups = aligned<G>(body.grad) && aligned<P>(body.param) && aligned<F32>(body.m) && aligned<F32>(body.v) &&
                   aligned<F32>(body.most) && aligned<L>(body.half);
  each_element(place.count, in_groups, body);
}

// -- SGD --

template <class G, class P, class L>
struct SgdBody {
  SgdNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float* buffer;
  typename L::type* half;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float g[N], p[N], velocity[N];
    G::load(grad + i, g), P::load(param + i, p);
    if (buffer && !c.first) F32::load(buffer + i, velocity);
#pragma unroll
    for (int j = 0; j < N; j++) sgd<float>(c, g[j], p[j], buffer ? &velocity[j] : nullptr);
    P::store(param + i, p);
    if (buffer) F32::store(buffer + i, velocity);
    L::store(half + i, p);
  }
};

template <class G, class P, class L>
AK_FN void sgd_block(const ak_sgd_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  SgdBody<G, P, L> body = {
    sgd_numbers(launch.args), column<G>(launch, AK_GRADS, place), column<P>(launch, AK_PARAMS, place),
    launch.args.buffers ? column<F32>(launch, AK_STATE1, place) : nullptr, column<L>(launch, AK_HALVES, place)};
  bool in_groups =
      aligned<G>(body.grad) && aligned<P>(body.param) && aligned<F32>(body.buffer) && aligned<L>(body.half);
  each_element(place.count, in_groups, body);
}

// -- Adagrad --

// A step with one state for each element, Adagrad's or NovoGrad's.
template <class Numbers, class G, class P, class L>
struct OneStateBody {
  Numbers c;
  const typename G::type* grad;
  typename P::type* param;
  float* state;
  typename L::type* half;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float g[N], p[N], s[N];
    G::load(grad + i, g), P::load(param + i, p), F32::load(state + i, s);
#pragma unroll
    for (int j = 0; j < N; j++) one_state_step<float>(c, g[j], p[j], s[j]);
    P::store(param + i, p), F32::store(state + i, s), L::store(half + i, p);
  }
};

template <class G, class P, class L, class Numbers, class Launch>
AK_FN void one_state_block(const Launch& launch, const Numbers& numbers, const Place& place) {
  OneStateBody<Numbers, G, P, L> body = {
    numbers, column<G>(launch, AK_GRADS, place), column<P>(launch, AK_PARAMS, place),
    column<F32>(launch, AK_STATE1, place), column<L>(launch, AK_HALVES, place)};
  bool in_groups =
      aligned<G>(body.grad) && aligned<P>(body.param) && aligned<F32>(body.state) && aligned<L>(body.half);
  each_element(place.count, in_groups, body);
}

template <class G, class P, class L>
AK_FN void adagrad_block(const ak_adagrad_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  one_state_block<G, P, L>(launch, adagrad_numbers(launch.args), place);
}

// -- sums --

// Sums, or the largest value, in which nan stays.
AK_FN double together(double a, double b, bool most) { return !most ? a + b : a > b || a != a ? a : b; }

// Returns all threads' values together to thread 0, in an order that is always the same.
AK_FN double of_block(double value, bool most = false) {
  __shared__ double of_warp[AK_WARPS];
  for (int offset = AK_WARP / 2; offset; offset /= 2) value = together(value, __shfl_down_sync(0xffffffffu, value, offset), most);
  // Of an earlier call everybody has read.
  __syncthreads();
  if (threadIdx.x % AK_WARP == 0) of_warp[threadIdx.x / AK_WARP] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < AK_WARPS; warp++) value = together(value, of_warp[warp], most);
  }
  return value;
}

// Returns the parts of one row together to thread 0; `stride` values lie between parts.
template <class Launch>
AK_FN double of_parts(const Launch& launch, const double* parts, int stride, bool most = false) {
  double value = 0.0;
  for (ak_uint32 i = launch.first_block[blockIdx.x] + threadIdx.x; i < launch.first_block[blockIdx.x + 1];
       i += blockDim.x)
    value = together(value, parts[stride * (launch.first_part + i)], most);
  return of_block(value, most);
}

// -- LAMB --

template <class G, class P, class L>
struct LambBody {
  LambNumbers c;
  const typename G::type* grad;
  typename P::type* param;
  float *m, *v;
  typename L::type* half;
  float values, updates;  // sums of few squares

  template <int N>
  AK_FN void at(ak_int32 i) {
    float g[N], p[N], first[N], second[N];
    G::load(grad + i, g), P::load(param + i, p), F32::load(m + i, first), F32::load(v + i, second);
#pragma unroll
    for (int j = 0; j < N; j++) {
      float update = lamb<float>(c, g[j], p[j], first[j], second[j]);
      if (c.trust) values += p[j] * p[j], updates += update * update;
      else p[j] = p[j] - c.lr * update;
    }
    F32::store(m + i, first), F32::store(v + i, second);
    if (c.trust) return;
    P::store(param + i, p), L::store(half + i, p);
  }
};

template <class G, class P, class L>
AK_FN void lamb_block(const ak_lamb_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  __shared__ LambNumbers numbers;
  if (threadIdx.x == 0) numbers = lamb_numbers(args_of_row(launch, AK_LAMB_STEPS, place.row), place.row);
  __syncthreads();
  LambBody<G, P, L> body = {
    numbers, column<G>(launch, AK_GRADS, place), column<P>(launch, AK_PARAMS, place),
    column<F32>(launch, AK_STATE1, place), column<F32>(launch, AK_STATE2, place), column<L>(launch, AK_HALVES, place),
    0.0f, 0.0f};
  bool in_groups = aligned<G>(body.grad) && aligned<P>(body.param) && aligned<F32>(body.m) && aligned<F32>(body.v) &&
                   aligned<L>(body.half);
  each_element(place.count, in_groups, body);
  if (!body.c.trust) return;
  double values = of_block(body.values), updates = of_block(body.updates);
  double* sums = launch.args.partial + 2 * (launch.first_part + blockIdx.x);
  if (threadIdx.x == 0) sums[0] = values, sums[1] = updates;
}

// A block for each tensor of the launch.
AK_GLOBAL ak_lamb_ratios(AK_LAUNCHED(ak_lamb_launch)) {
  if (skipped(launch.args.head.found_inf)) return;
  double values = of_parts(launch, launch.args.partial, 2), updates = of_parts(launch, launch.args.partial + 1, 2);
  if (threadIdx.x == 0) launch.args.ratios[launch.first_tensor + blockIdx.x] = trust_ratio(values, updates);
}

template <class P, class L>
struct LambLastBody {
  LambNumbers c;
  typename P::type* param;
  const float *m, *v;
  typename L::type* half;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float p[N], first[N], second[N];
    P::load(param + i, p), F32::load(m + i, first), F32::load(v + i, second);
#pragma unroll
    for (int j = 0; j < N; j++) p[j] = p[j] - c.lr * lamb_update<float>(c, p[j], first[j], second[j]);
    P::store(param + i, p), L::store(half + i, p);
  }
};

// The second pass, where the averages are those of this step.
template <class P, class L>
AK_FN void lamb_last_block(const ak_lamb_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  __shared__ LambNumbers numbers;
  if (threadIdx.x == 0) {
    numbers = lamb_numbers(args_of_row(launch, AK_LAMB_STEPS, place.row), place.row);
    numbers.lr *= launch.args.ratios[launch.first_tensor + place.row];
  }
  __syncthreads();
  LambLastBody<P, L> body = {
    numbers, column<P>(launch, AK_PARAMS, place), column<F32>(launch, AK_STATE1, place),
    column<F32>(launch, AK_STATE2, place), column<L>(launch, AK_HALVES, place)};
  bool in_groups = aligned<P>(body.param) && aligned<F32>(body.m) && aligned<F32>(body.v) && aligned<L>(body.half);
  each_element(place.count, in_groups, body);
}

// -- NovoGrad --

// The first pass is that of `scale`. A block for each tensor of the launch.
AK_GLOBAL ak_novograd_norms(AK_LAUNCHED(ak_novograd_launch)) {
  if (skipped(launch.args.head.found_inf)) return;
  bool most = launch.args.flags & AK_MAX_NORM;
  double norm = of_parts(launch, launch.args.partial + launch.args.head.tensors, 1, most);
  if (threadIdx.x) return;
  float* average = (float*)launch.pointers[AK_STATE2][blockIdx.x];
  *average = novograd_norm(launch.args, *average, most ? norm : sqrt(norm));
}

template <class G, class P, class L>
AK_FN void novograd_block(const ak_novograd_launch& launch) {
  if (skipped(launch.args.head.found_inf)) return;
  Place place = place_of_block(launch);
  __shared__ NovogradNumbers numbers;
  if (threadIdx.x == 0) {
    ak_novograd_args args = args_of_row(launch, AK_NOVOGRAD_STEPS, place.row);
    args.norms = (float* const*)launch.pointers[AK_STATE2];
    numbers = novograd_numbers(args, place.row);
  }
  __syncthreads();
  one_state_block<G, P, L>(launch, numbers, place);
}

// -- scale, check and norms --

// Of inf and nan the difference is nan.
AK_FN bool not_finite(float x) { return x - x != 0.0f; }

AK_FN void tell(bool bad, float* found) {
  if (found && __syncthreads_or(bad) && threadIdx.x == 0) *found = 1.0f;
}

template <class I, class O>
struct ScaleBody {
  float factor;
  bool most;
  const typename I::type* in;
  typename O::type* out;
  float squares;  // a sum of few
  float largest;
  bool bad;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float x[N];
    I::load(in + i, x);
#pragma unroll
    for (int j = 0; j < N; j++) {
      bad |= not_finite(x[j]);
      x[j] = x[j] * factor;
      if (most) largest = larger(fabsf(x[j]), largest);
      else squares += x[j] * x[j];
    }
    O::store(out + i, x);
  }
};

template <class I, class O>
AK_FN void scale_block(const ak_scale_launch& launch) {
  Place place = place_of_block(launch);
  bool most = launch.args.flags & AK_MAX_NORM;
  ScaleBody<I, O> body = {
    gradient_factor(launch.args.grad_scale), most, column<I>(launch, AK_INS, place),
    column<O>(launch, AK_OUTS, place), 0.0f, 0.0f, false};
  each_element(place.count, aligned<I>(body.in) && aligned<O>(body.out), body);
  tell(body.bad, launch.args.found);
  if (!launch.args.partial) return;
  double value = of_block((double)(most ? body.largest : body.squares), most);
  // Behind the tensors' own.
  double* parts = launch.args.partial + launch.args.head.tensors;
  if (threadIdx.x == 0) parts[launch.first_part + blockIdx.x] = value;
}

// A block for each tensor of the launch.
AK_GLOBAL ak_scale_norms(AK_LAUNCHED(ak_scale_launch)) {
  bool most = launch.args.flags & AK_MAX_NORM;
  double value = of_parts(launch, launch.args.partial + launch.args.head.tensors, 1, most);
  if (threadIdx.x) return;
  ak_int64 tensor = launch.first_tensor + blockIdx.x;
  launch.args.partial[tensor] = value;
  if (launch.args.norms) launch.args.norms[tensor] = (float)(most ? value : sqrt(value));
}

// One block, after all launches of a call: the norm of all.
AK_GLOBAL ak_scale_total(AK_LAUNCHED(ak_scale_args)) {
  bool most = launch.flags & AK_MAX_NORM;
  double value = 0.0;
  for (ak_int64 i = threadIdx.x; i < launch.head.tensors; i += blockDim.x)
    value = together(value, launch.partial[i], most);
  value = of_block(value, most);
  if (threadIdx.x == 0) *launch.total = (float)(most ? value : sqrt(value));
}

// -- axpby --

template <class X, class Y, class O>
struct AxpbyBody {
  float a, b;
  bool check_x, check_y;
  const typename X::type* x;
  const typename Y::type* y;
  typename O::type* out;
  bool bad;

  template <int N>
  AK_FN void at(ak_int32 i) {
    float one[N], other[N];
    X::load(x + i, one), Y::load(y + i, other);
#pragma unroll
    for (int j = 0; j < N; j++) {
      bad |= (check_x && not_finite(one[j])) || (check_y && not_finite(other[j]));
      one[j] = a * one[j] + b * other[j];
    }
    O::store(out + i, one);
  }
};

template <class X, class Y, class O>
AK_FN void axpby_block(const ak_axpby_launch& launch) {
  Place place = place_of_block(launch);
  AxpbyBody<X, Y, O> body = {
    gradient_factor(launch.args.x_scale), (float)launch.args.b, (launch.args.flags & AK_CHECK_X) != 0,
    (launch.args.flags & AK_CHECK_Y) != 0, column<X>(launch, AK_XS, place), column<Y>(launch, AK_YS, place),
    column<O>(launch, AK_SUMS, place), false};
  each_element(place.count, aligned<X>(body.x) && aligned<Y>(body.y) && aligned<O>(body.out), body);
  tell(body.bad, launch.args.found);
}

#include "cuda_norms.h"

// -- counts of steps --

AK_GLOBAL ak_advance(AK_LAUNCHED(ak_advance_launch)) {
  if (skipped(launch.args.found_inf)) return;
  ak_int32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < launch.rows) *(float*)launch.pointers[0][i] += 1.0f;
  if (i || !launch.args.step.one) return;
  if (launch.args.step.dtype == AK_F32) *(float*)launch.args.step.one += 1.0f;
  else if (launch.args.step.dtype == AK_I32) *(ak_int32*)launch.args.step.one += 1;
  else *(ak_int64*)launch.args.step.one += 1;
}

// -- the kernels' names: ak_<kernel>_<dtypes>, of f (fp32), h (fp16), b (bf16) and n (none) --

#define AK_STEP(NAME, G, P, L, SUFFIX) \
  AK_GLOBAL ak_##NAME##_##SUFFIX(AK_LAUNCHED(ak_##NAME##_launch)) { NAME##_block<G, P, L>(launch); }
#define AK_MAKE_adam(G, P, L, SUFFIX) AK_STEP(adam, G, P, L, SUFFIX)
#define AK_MAKE_sgd(G, P, L, SUFFIX) AK_STEP(sgd, G, P, L, SUFFIX)
#define AK_MAKE_adagrad(G, P, L, SUFFIX) AK_STEP(adagrad, G, P, L, SUFFIX)
#define AK_MAKE_lamb(G, P, L, SUFFIX) AK_STEP(lamb, G, P, L, SUFFIX)
#define AK_MAKE_novograd(G, P, L, SUFFIX) AK_STEP(novograd, G, P, L, SUFFIX)
#define AK_MAKE_axpby(X, Y, O, SUFFIX) AK_STEP(axpby, X, Y, O, SUFFIX)
#define AK_MAKE_lamb_last(P, L, SUFFIX) \
  AK_GLOBAL ak_lamb_last_##SUFFIX(AK_LAUNCHED(ak_lamb_launch)) { lamb_last_block<P, L>(launch); }
#define AK_MAKE_scale(I, O, SUFFIX) \
  AK_GLOBAL ak_scale_##SUFFIX(AK_LAUNCHED(ak_scale_launch)) { scale_block<I, O>(launch); }

#define AK_MAKE_norm(G, X, SUFFIX)                                                              \
  AK_GLOBAL ak_norm_##SUFFIX(AK_LAUNCHED(ak_norm_args)) { norm_block<G, X>(launch); }           \
  AK_GLOBAL ak_norm_columns_##SUFFIX(AK_LAUNCHED(ak_norm_args)) { norm_columns_block<G, X>(launch); }
#define AK_MAKE_statistics(X, SUFFIX)                                                                     \
  AK_GLOBAL ak_statistics_##SUFFIX(AK_LAUNCHED(ak_statistics_args)) { statistics_block<X>(launch); }      \
  AK_GLOBAL ak_statistics_side_##SUFFIX(AK_LAUNCHED(ak_statistics_args)) { statistics_side_block<X>(launch); }
// Kernels without dtypes are in each image.
#define AK_MAKE_merge(...)

#if defined(AK_ONE)
// Some of them, such as AK_MAKE_adam(BF16, F32, BF16, bfb): what a process needs at once is compiled at first use.
AK_ONE
#else
#define AK_FOR_PARAMS(MAKE, G, g) \
  MAKE(G, F32, Nothing, g##fn)    \
  MAKE(G, F32, BF16, g##fb)       \
  MAKE(G, F32, F16, g##fh)        \
  MAKE(G, BF16, Nothing, g##bn)   \
  MAKE(G, F16, Nothing, g##hn)
#define AK_FOR_DTYPES(MAKE) AK_FOR_PARAMS(MAKE, F32, f) AK_FOR_PARAMS(MAKE, BF16, b) AK_FOR_PARAMS(MAKE, F16, h)
#define AK_FOR_OUTS(MAKE, I, i) MAKE(I, Nothing, i##n) MAKE(I, F32, i##f) MAKE(I, BF16, i##b) MAKE(I, F16, i##h)
#define AK_FOR_SUMS(MAKE, X, Y, xy) MAKE(X, Y, F32, xy##f) MAKE(X, Y, BF16, xy##b) MAKE(X, Y, F16, xy##h)
#define AK_FOR_YS(MAKE, X, x) \
  AK_FOR_SUMS(MAKE, X, F32, x##f) AK_FOR_SUMS(MAKE, X, BF16, x##b) AK_FOR_SUMS(MAKE, X, F16, x##h)

AK_FOR_DTYPES(AK_MAKE_adam)
AK_FOR_DTYPES(AK_MAKE_sgd)
AK_FOR_DTYPES(AK_MAKE_adagrad)
AK_FOR_DTYPES(AK_MAKE_lamb)
AK_MAKE_lamb_last(F32, Nothing, fn)
AK_MAKE_lamb_last(F32, BF16, fb)
AK_MAKE_lamb_last(F32, F16, fh)
AK_MAKE_lamb_last(BF16, Nothing, bn)
AK_MAKE_lamb_last(F16, Nothing, hn)
AK_FOR_DTYPES(AK_MAKE_novograd)
AK_FOR_OUTS(AK_MAKE_scale, F32, f)
AK_FOR_OUTS(AK_MAKE_scale, BF16, b)
AK_FOR_OUTS(AK_MAKE_scale, F16, h)
AK_FOR_YS(AK_MAKE_axpby, F32, f)
AK_FOR_YS(AK_MAKE_axpby, BF16, b)
AK_FOR_YS(AK_MAKE_axpby, F16, h)
#define AK_FOR_INS(MAKE, G, g) MAKE(G, F32, g##f) MAKE(G, BF16, g##b) MAKE(G, F16, g##h)
AK_FOR_INS(AK_MAKE_norm, F32, f)
AK_FOR_INS(AK_MAKE_norm, BF16, b)
AK_FOR_INS(AK_MAKE_norm, F16, h)
AK_MAKE_statistics(F32, f)
AK_MAKE_statistics(BF16, b)
AK_MAKE_statistics(F16, h)
#endif
