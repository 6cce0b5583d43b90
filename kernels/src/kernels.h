// The arguments and the arithmetic of all kernels. cpu.cpp and cuda.cu compile the same steps for their devices.
//
// Nothing is contracted to fused multiply-adds (setup.py says so), so all builds give the same bits of an element.
#ifndef AUTOAMP_KERNELS_H
#define AUTOAMP_KERNELS_H

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define AK_FN __device__ __forceinline__
#else
#define AK_FN inline __attribute__((always_inline))
#endif
#define AK_PUBLIC extern "C" __attribute__((visibility("default")))

// Of the structs below; library.py has the same number.
const int32_t AK_VERSION = 5;
// Elements of one tensor that one block of a GPU, or one turn of a thread, takes.
const int64_t AK_CHUNK = 8192;

enum { AK_OK = 0, AK_WRONG_DTYPE = 1, AK_FAILED = 2 };
enum { AK_NO_DTYPE = -1, AK_F32 = 0, AK_F16 = 1, AK_BF16 = 2, AK_I32 = 3 };
enum {
  AK_DECOUPLED = 1,           // the decay is AdamW's, or LAMB's; if not, it is added to the gradient
  AK_NO_BIAS_CORRECTION = 2,  // averages are not divided by 1 - beta^step
  AK_EPS_INSIDE = 4,          // eps is added under the root
  AK_NESTEROV = 8,
  AK_FIRST = 16,              // SGD's buffers hold nothing yet
  AK_DECAY_AFTER = 32,        // SGD's decay is added to the velocity
  AK_TRUST = 64,              // updates are multiplied by LAMB's trust ratios
};

// The lists of a step: gradients, parameters, half copies of these, and two states.
enum { AK_GRADS, AK_PARAMS, AK_HALVES, AK_STATE1, AK_STATE2, AK_LISTS };

// One step of many tensors. Lists and counts lie on the host, what a list points to lies on the device of the call.
struct StepArgs {
  int32_t device;   // the number of a GPU; -1 for the CPU
  int32_t threads;  // of the CPU
  int32_t grad_dtype, param_dtype, half_dtype, step_dtype;
  int32_t flags, unused;
  int64_t tensors, chunks;
  const int64_t* counts;       // [tensors] elements of each
  const int64_t* first_chunk;  // [tensors + 1] chunks of the tensors before
  void* const* lists[AK_LISTS];  // each [tensors], or NULL
  void* stream;
  const float* found_inf;    // NULL, or one element: unless it is 0 nothing is written
  const float* lr_at;        // NULL, or one element that counts instead of lr
  const void* step_at;       // NULL, or one element of step_dtype that counts instead of step
  const float* global_norm;  // NULL, or one element: the 2-norm of all gradients
  double* space;             // LAMB's: [2 * chunks] sums of squares, then [tensors] trust ratios
  double inv_scale, lr, beta1, beta2, weight, eps, weight_decay, max_norm, step;
};

// -- elements --

template <class To, class From>
AK_FN To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct F32 {
  typedef float type;
  static const int CODE = AK_F32;
  static AK_FN float wide(float x) { return x; }
  static AK_FN float narrow(float x) { return x; }
};

struct BF16 {
  typedef uint16_t type;
  static const int CODE = AK_BF16;
  static AK_FN float wide(uint16_t h) { return bits_as<float>((uint32_t)h << 16); }
  static AK_FN uint16_t narrow(float x) {
    uint32_t bits = bits_as<uint32_t>(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)((x != x ? bits | 0x400000u : rounded) >> 16);
  }
};

struct F16 {
  typedef uint16_t type;
  static const int CODE = AK_F16;
#if defined(__CUDA_ARCH__)
  static AK_FN float wide(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
  }
  static AK_FN uint16_t narrow(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
  }
#else
  static AK_FN float wide(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu, normal = (body << 13) + (112u << 23);
    // inf and nan: the largest exponent of fp32.
    normal += body >= 0x7c00u ? 112u << 23 : 0u;
    // A subnormal is its integer times 2^-24.
    uint32_t small = bits_as<uint32_t>((float)(int32_t)body * 0x1p-24f);
    return bits_as<float>((body < 0x400u ? small : normal) | sign);
  }
  static AK_FN uint16_t narrow(float x) {
    uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
    uint32_t result = ((body + 0xfffu + ((body >> 13) & 1u)) >> 13) - (112u << 10);
    // Below 2^-14: one fp32 addition rounds to multiples of 2^-24, the unit of fp16's subnormals.
    uint32_t small = bits_as<uint32_t>(bits_as<float>(body) + 0.5f) - 0x3f000000u;
    result = body < 0x38800000u ? small : result;
    result = body >= 0x47800000u ? 0x7c00u : result;
    result = body > 0x7f800000u ? ((body >> 13) & 0x3ffu) | 0x7e00u : result;
    return (uint16_t)(result | sign);
  }
#endif
};

// Half copies that are not wanted.
struct Nothing {
  typedef float type;
  static const int CODE = AK_NO_DTYPE;
};

// Elements that a thread of a GPU reads or writes by one instruction, where they are aligned.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// N is 1 or 4 on a GPU. On a CPU it is 1, or large, and the loops become loops of vectors.
const int AK_PACKED = 4;

template <class E, int N>
AK_FN void load(const typename E::type* from, float (&x)[N]) {
  if constexpr (N <= AK_PACKED) {
    Pack<typename E::type, N> pack = *(const Pack<typename E::type, N>*)from;
    for (int j = 0; j < N; j++) x[j] = E::wide(pack.at[j]);
  } else {
    for (int j = 0; j < N; j++) x[j] = E::wide(from[j]);
  }
}

template <class E, int N>
AK_FN void store(typename E::type* to, const float (&x)[N]) {
  if constexpr (E::CODE == AK_NO_DTYPE) {
    return;
  } else if constexpr (N <= AK_PACKED) {
    Pack<typename E::type, N> pack;
    for (int j = 0; j < N; j++) pack.at[j] = E::narrow(x[j]);
    *(Pack<typename E::type, N>*)to = pack;
  } else {
    for (int j = 0; j < N; j++) to[j] = E::narrow(x[j]);
  }
}

// One tensor of a step, from an element of it on.
template <class G, class P, class H>
struct Tensors {
  const typename G::type* grad;
  typename P::type* param;
  typename H::type* half;
  float *state1, *state2;

  AK_FN Tensors(void* const (&lists)[AK_LISTS], int64_t begin)
      : grad(from<typename G::type>(lists[AK_GRADS], begin)), param(from<typename P::type>(lists[AK_PARAMS], begin)),
        half(from<typename H::type>(lists[AK_HALVES], begin)), state1(from<float>(lists[AK_STATE1], begin)),
        state2(from<float>(lists[AK_STATE2], begin)) {}

  template <class T>
  static AK_FN T* from(void* first, int64_t begin) {
    return first ? (T*)first + begin : nullptr;
  }

  // Tells whether groups of N elements begin at multiples of their size everywhere.
  template <int N>
  AK_FN bool aligned() const {
    return on<N>(grad) && on<N>(param) && on<N>(half) && on<N>(state1) && on<N>(state2);
  }

  template <int N, class T>
  static AK_FN bool on(T* at) {
    return ((uintptr_t)at & (N * sizeof(T) - 1)) == 0;
  }
};

// Calls run(G{}, P{}, H{}) for the dtypes of a step. Parameters in half precision have no half copies.
template <class Run>
int by_dtypes(const StepArgs& a, Run run) {
  auto of_params = [&](auto grad) -> int {
    if (a.param_dtype == AK_F16 && a.half_dtype == AK_NO_DTYPE) return run(grad, F16{}, Nothing{});
    if (a.param_dtype == AK_BF16 && a.half_dtype == AK_NO_DTYPE) return run(grad, BF16{}, Nothing{});
    if (a.param_dtype != AK_F32) return AK_WRONG_DTYPE;
    if (a.half_dtype == AK_F16) return run(grad, F32{}, F16{});
    if (a.half_dtype == AK_BF16) return run(grad, F32{}, BF16{});
    return a.half_dtype == AK_NO_DTYPE ? run(grad, F32{}, Nothing{}) : AK_WRONG_DTYPE;
  };
  if (a.grad_dtype == AK_F32) return of_params(F32{});
  if (a.grad_dtype == AK_F16) return of_params(F16{});
  return a.grad_dtype == AK_BF16 ? of_params(BF16{}) : AK_WRONG_DTYPE;
}

// -- numbers of a step --

AK_FN double rate_of(const StepArgs& a) { return a.lr_at ? (double)*a.lr_at : a.lr; }

// 1 - beta^step, or 1 where averages are not corrected.
AK_FN double bias_of(const StepArgs& a, double beta) {
  if (a.flags & AK_NO_BIAS_CORRECTION) return 1.0;
  double step = a.step;
  if (a.step_at) step = a.step_dtype == AK_I32 ? (double)*(const int32_t*)a.step_at : (double)*(const float*)a.step_at;
  return 1.0 - pow(beta, step);
}

// -- Adam, AdamW (Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101) --

struct AdamNumbers {
  float factor;    // of the gradient
  float l2;        // weight decay that is added to the gradient
  float shrink;    // 1 - lr * decay, where the decay is decoupled
  float weight1;   // 1 - beta1
  float beta2, weight2;
  float inverse_bias2, size;  // size = lr / (1 - beta1^step)
  float eps_inside, eps_outside;
};

template <class G, class P, class H>
struct Adam {
  typedef AdamNumbers Numbers;
  Numbers c;
  Tensors<G, P, H> t;

  static AK_FN Numbers numbers(const StepArgs& a, int64_t) {
    double lr = rate_of(a);
    bool decoupled = a.flags & AK_DECOUPLED, inside = a.flags & AK_EPS_INSIDE;
    return Numbers{
      (float)a.inv_scale, decoupled ? 0.0f : (float)a.weight_decay, decoupled ? (float)(1.0 - lr * a.weight_decay) : 1.0f,
      (float)(1.0 - a.beta1), (float)a.beta2, (float)(1.0 - a.beta2), (float)(1.0 / bias_of(a, a.beta2)),
      (float)(lr / bias_of(a, a.beta1)), inside ? (float)a.eps : 0.0f, inside ? 0.0f : (float)a.eps};
  }

  template <int N>
  AK_FN void at(int64_t i) {
    float g[N], p[N], m[N], v[N];
    load<G>(t.grad + i, g), load<P>(t.param + i, p), load<F32>(t.state1 + i, m), load<F32>(t.state2 + i, v);
    for (int j = 0; j < N; j++) {
      g[j] *= c.factor;
      // A decay of 0 must not make nan of a parameter that is inf.
      if (c.l2 != 0.0f) g[j] += c.l2 * p[j];
      p[j] *= c.shrink;
      m[j] += c.weight1 * (g[j] - m[j]);
      v[j] = c.beta2 * v[j] + c.weight2 * (g[j] * g[j]);
      p[j] -= c.size * (m[j] / (sqrtf(v[j] * c.inverse_bias2 + c.eps_inside) + c.eps_outside));
    }
    store<P>(t.param + i, p), store<F32>(t.state1 + i, m), store<F32>(t.state2 + i, v), store<H>(t.half + i, p);
  }
};

// -- SGD with momentum (Sutskever et al. 2013, ICML 28, p. 1139), as torch.optim.SGD has it --

struct SgdNumbers {
  float factor, lr, momentum, weight, decay_before, decay_after;
  bool nesterov, first;
};

template <class G, class P, class H>
struct Sgd {
  typedef SgdNumbers Numbers;
  Numbers c;
  Tensors<G, P, H> t;

  static AK_FN Numbers numbers(const StepArgs& a, int64_t) {
    bool after = a.flags & AK_DECAY_AFTER;
    return Numbers{
      (float)a.inv_scale, (float)rate_of(a), (float)a.beta1, (float)a.weight, after ? 0.0f : (float)a.weight_decay,
      after ? (float)a.weight_decay : 0.0f, (a.flags & AK_NESTEROV) != 0, (a.flags & AK_FIRST) != 0};
  }

  template <int N>
  AK_FN void at(int64_t i) {
    float g[N], p[N], velocity[N];
    load<G>(t.grad + i, g), load<P>(t.param + i, p);
    if (t.state1 && !c.first) load<F32>(t.state1 + i, velocity);
    for (int j = 0; j < N; j++) {
      g[j] *= c.factor;
      if (c.decay_before != 0.0f) g[j] += c.decay_before * p[j];
      if (t.state1) {
        velocity[j] = c.first ? g[j] : c.momentum * velocity[j] + c.weight * g[j];
        g[j] = c.nesterov ? g[j] + c.momentum * velocity[j] : velocity[j];
      }
      if (c.decay_after != 0.0f) g[j] += c.decay_after * p[j];
      p[j] -= c.lr * g[j];
    }
    store<P>(t.param + i, p), store<H>(t.half + i, p);
    if (t.state1) store<F32>(t.state1 + i, velocity);
  }
};

// -- LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2, where phi is the identity) --
//
// The first pass writes the averages and sums squares, the second computes the updates again from the averages, which
// moves as many bytes as keeping them would, and writes the parameters. Without AK_TRUST the first does all.

struct LambNumbers {
  float factor, l2, decay;       // of the gradient; decay that is added to it; decay that is added to the update
  float beta1, weight1, beta2, weight2;
  float inverse_bias1, inverse_bias2, eps, lr;
  bool trust;
};

AK_FN LambNumbers lamb_numbers(const StepArgs& a) {
  double factor = a.inv_scale;
  if (a.global_norm && a.max_norm > 0.0) {
    double excess = (double)*a.global_norm / a.max_norm;
    // A norm of nan makes all of it nan.
    if (!(excess <= 1.0)) factor /= excess;
  }
  bool decoupled = a.flags & AK_DECOUPLED;
  return LambNumbers{
    (float)factor, decoupled ? 0.0f : (float)a.weight_decay, decoupled ? (float)a.weight_decay : 0.0f, (float)a.beta1,
    (float)a.weight, (float)a.beta2, (float)(1.0 - a.beta2), (float)(1.0 / bias_of(a, a.beta1)),
    (float)(1.0 / bias_of(a, a.beta2)), (float)a.eps, (float)rate_of(a), (a.flags & AK_TRUST) != 0};
}

template <int N>
AK_FN void lamb_updates(
    const LambNumbers& c, const float (&p)[N], const float (&m)[N], const float (&v)[N], float (&updates)[N]) {
  for (int j = 0; j < N; j++) updates[j] = m[j] * c.inverse_bias1 / (sqrtf(v[j] * c.inverse_bias2) + c.eps);
  for (int j = 0; c.decay != 0.0f && j < N; j++) updates[j] += c.decay * p[j];
}

// |parameter| / |update| of sums of squares, 1 where either is 0.
AK_FN double trust_ratio(double params, double updates) {
  return params != 0.0 && updates != 0.0 ? sqrt(params) / sqrt(updates) : 1.0;
}

// Sums of squares, of few in each lane, whose order depends on sizes alone.
struct Squares {
  static const int LANES = 16;
  float lanes[LANES] = {};

  template <int N>
  AK_FN void add(const float (&x)[N]) {
    for (int first = 0; first < N; first += LANES)
      for (int lane = 0; lane < (N < LANES ? N : LANES); lane++) lanes[lane] += x[first + lane] * x[first + lane];
  }

  AK_FN double take() {
    double all = 0.0;
    for (int lane = 0; lane < LANES; lane++) all += (double)lanes[lane], lanes[lane] = 0.0f;
    return all;
  }
};

template <class G, class P, class H>
struct Lamb {
  typedef LambNumbers Numbers;
  Numbers c;
  Tensors<G, P, H> t;
  Squares params, updates;

  static AK_FN Numbers numbers(const StepArgs& a, int64_t) { return lamb_numbers(a); }

  template <int N>
  AK_FN void at(int64_t i) {
    float g[N], p[N], m[N], v[N];
    load<G>(t.grad + i, g), load<P>(t.param + i, p), load<F32>(t.state1 + i, m), load<F32>(t.state2 + i, v);
    for (int j = 0; j < N; j++) g[j] *= c.factor;
    // A decay of 0 must not make nan of a parameter that is inf.
    for (int j = 0; c.l2 != 0.0f && j < N; j++) g[j] += c.l2 * p[j];
    for (int j = 0; j < N; j++) {
      m[j] = c.beta1 * m[j] + c.weight1 * g[j];
      v[j] = c.beta2 * v[j] + c.weight2 * (g[j] * g[j]);
    }
    lamb_updates(c, p, m, v, g);
    store<F32>(t.state1 + i, m), store<F32>(t.state2 + i, v);
    if (c.trust) {
      params.add(p), updates.add(g);
      return;
    }
    for (int j = 0; j < N; j++) p[j] -= c.lr * g[j];
    store<P>(t.param + i, p), store<H>(t.half + i, p);
  }
};

// The second pass, where the averages are those of this step.
template <class G, class P, class H>
struct LambLast {
  typedef LambNumbers Numbers;
  Numbers c;
  Tensors<G, P, H> t;

  static AK_FN Numbers numbers(const StepArgs& a, int64_t tensor) {
    Numbers c = lamb_numbers(a);
    c.lr *= (float)a.space[2 * a.chunks + tensor];
    return c;
  }

  template <int N>
  AK_FN void at(int64_t i) {
    float p[N], m[N], v[N], updates[N];
    load<P>(t.param + i, p), load<F32>(t.state1 + i, m), load<F32>(t.state2 + i, v);
    lamb_updates(c, p, m, v, updates);
    for (int j = 0; j < N; j++) p[j] -= c.lr * updates[j];
    store<P>(t.param + i, p), store<H>(t.half + i, p);
  }
};

#endif
