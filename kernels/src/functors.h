// The arithmetic of every kernel, once, for a float on a GPU and for a vector of floats on a CPU.
//
// Each function is a template of the type V that holds the elements: `float` under nvcc and NVRTC, a vector type of the
// compiler on a host. Nothing is contracted to fused multiply-adds (the builds say so), and only operations that IEEE
// 754 rounds exactly are used, so all builds give the same bits.
#ifndef AUTOAMP_KERNELS_FUNCTORS_H
#define AUTOAMP_KERNELS_FUNCTORS_H

#include "function.h"

#if defined(__CUDACC__)
AK_FN float root(float x) { return sqrtf(x); }
AK_FN float larger(float a, float b) { return (a > b || a != a) ? a : b; }
#endif

AK_FN float gradient_factor(const ak_grad_scale& scale) {
  double factor = scale.number;
  if (scale.factor) factor *= (double)*scale.factor;
  if (scale.scale) factor /= (double)*scale.scale;
  return (float)factor;
}

AK_FN double step_of(const ak_step& step, ak_int64 tensor) {
  if (step.each) return (double)*step.each[tensor];
  if (!step.one) return step.number;
  if (step.dtype == AK_F32) return (double)*(const float*)step.one;
  if (step.dtype == AK_I32) return (double)*(const ak_int32*)step.one;
  return (double)*(const ak_int64*)step.one;
}

// -- Adam, AdamW, AMSGrad --

struct AdamNumbers {
  float factor;         // of the gradient
  float l2;             // weight decay that is added to the gradient
  float shrink;         // 1 - lr * decay, where the decay is decoupled
  float weight1;        // 1 - beta1
  float beta2, weight2;  // weight2 = 1 - beta2
  float inverse_bias2;  // 1 / (1 - beta2^step)
  float size;           // lr / (1 - beta1^step)
  float eps_inside, eps_outside;
};

AK_FN AdamNumbers adam_numbers(const ak_adam_args& a, ak_int64 tensor) {
  AdamNumbers c;
  double lr = a.lr_at ? (double)*a.lr_at : a.lr;
  double bias1 = 1.0, bias2 = 1.0;
  if (!(a.flags & AK_NO_BIAS_CORRECTION)) {
    double step = step_of(a.step, tensor);
    bias1 = 1.0 - AK_POW(a.beta1, step);
    bias2 = 1.0 - AK_POW(a.beta2, step);
  }
  bool decoupled = a.flags & AK_DECOUPLED;
  c.factor = gradient_factor(a.grad_scale);
  if (a.flags & AK_MAXIMIZE) c.factor = -c.factor;
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.shrink = decoupled ? (float)(1.0 - lr * a.weight_decay) : 1.0f;
  c.weight1 = (float)(1.0 - a.beta1);
  c.beta2 = (float)a.beta2;
  c.weight2 = (float)(1.0 - a.beta2);
  c.inverse_bias2 = (float)(1.0 / bias2);
  c.size = (float)(lr / bias1);
  c.eps_inside = (a.flags & AK_EPS_INSIDE) ? (float)a.eps : 0.0f;
  c.eps_outside = (a.flags & AK_EPS_INSIDE) ? 0.0f : (float)a.eps;
  return c;
}

// Steps parameter p, averages m and v and, where `most` is not NULL, the largest v so far.
template <class V>
AK_FN void adam(const AdamNumbers& c, V g, V& p, V& m, V& v, V* most) {
  g = g * c.factor;
  // A decay of 0 must not make nan of a parameter that is inf.
  if (c.l2 != 0.0f) g = g + c.l2 * p;
  p = p * c.shrink;
  m = m + c.weight1 * (g - m);
  v = c.beta2 * v + c.weight2 * (g * g);
  V second = v;
  if (most) second = *most = larger(*most, v);
  p = p - c.size * (m / (root(second * c.inverse_bias2 + c.eps_inside) + c.eps_outside));
}

// -- SGD --

struct SgdNumbers {
  float factor, lr, momentum, weight, decay_before, decay_after;
  bool nesterov, first;
};

AK_FN SgdNumbers sgd_numbers(const ak_sgd_args& a) {
  SgdNumbers c;
  bool after = a.flags & AK_DECAY_AFTER;
  c.factor = gradient_factor(a.grad_scale);
  if (a.flags & AK_MAXIMIZE) c.factor = -c.factor;
  c.lr = a.lr_at ? *a.lr_at : (float)a.lr;
  c.momentum = (float)a.momentum;
  c.weight = (float)(1.0 - a.dampening);
  c.decay_before = after ? 0.0f : (float)a.weight_decay;
  c.decay_after = after ? (float)a.weight_decay : 0.0f;
  c.nesterov = a.flags & AK_NESTEROV;
  c.first = a.flags & AK_FIRST;
  return c;
}

// Steps parameter p and, where it is not NULL, its velocity.
template <class V>
AK_FN void sgd(const SgdNumbers& c, V g, V& p, V* velocity) {
  g = g * c.factor;
  if (c.decay_before != 0.0f) g = g + c.decay_before * p;
  if (velocity) {
    *velocity = c.first ? g : c.momentum * *velocity + c.weight * g;
    g = c.nesterov ? g + c.momentum * *velocity : *velocity;
  }
  if (c.decay_after != 0.0f) g = g + c.decay_after * p;
  p = p - c.lr * g;
}

// -- Adagrad --

struct AdagradNumbers {
  float factor, lr, eps, l2, decoupled;
};

AK_FN AdagradNumbers adagrad_numbers(const ak_adagrad_args& a) {
  AdagradNumbers c;
  bool decoupled = a.flags & AK_DECOUPLED;
  c.factor = gradient_factor(a.grad_scale);
  if (a.flags & AK_MAXIMIZE) c.factor = -c.factor;
  c.lr = a.lr_at ? *a.lr_at : (float)a.lr;
  c.eps = (float)a.eps;
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.decoupled = decoupled ? (float)a.weight_decay : 0.0f;
  return c;
}

template <class V>
AK_FN void adagrad(const AdagradNumbers& c, V g, V& p, V& sum) {
  g = g * c.factor;
  if (c.l2 != 0.0f) g = g + c.l2 * p;
  sum = sum + g * g;
  V update = g / (root(sum) + c.eps);
  if (c.decoupled != 0.0f) update = update + c.decoupled * p;
  p = p - c.lr * update;
}

// -- LAMB --

struct LambNumbers {
  float factor;          // of the gradient
  float l2;              // weight decay that is added to the gradient
  float decay;           // weight decay that is added to the update
  float beta1, weight1;  // weight1 is that of a gradient in its average
  float beta2, weight2;  // weight2 = 1 - beta2
  float inverse_bias1, inverse_bias2;
  float eps, lr;
  bool trust;
};

AK_FN LambNumbers lamb_numbers(const ak_lamb_args& a, ak_int64 tensor) {
  LambNumbers c;
  double bias1 = 1.0, bias2 = 1.0;
  if (!(a.flags & AK_NO_BIAS_CORRECTION)) {
    double step = step_of(a.step, tensor);
    bias1 = 1.0 - AK_POW(a.beta1, step);
    bias2 = 1.0 - AK_POW(a.beta2, step);
  }
  bool decoupled = a.flags & AK_DECOUPLED;
  c.factor = gradient_factor(a.grad_scale);
  if (a.global_norm && a.max_norm > 0.0) {
    double excess = (double)*a.global_norm / a.max_norm;
    // A norm of nan makes all of it nan.
    if (!(excess <= 1.0)) c.factor = (float)((double)c.factor / excess);
  }
  if (a.flags & AK_MAXIMIZE) c.factor = -c.factor;
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.decay = decoupled ? (float)a.weight_decay : 0.0f;
  c.beta1 = (float)a.beta1;
  c.weight1 = (float)a.weight;
  c.beta2 = (float)a.beta2;
  c.weight2 = (float)(1.0 - a.beta2);
  c.inverse_bias1 = (float)(1.0 / bias1);
  c.inverse_bias2 = (float)(1.0 / bias2);
  c.eps = (float)a.eps;
  c.lr = a.lr_at ? *a.lr_at : (float)a.lr;
  c.trust = a.flags & AK_TRUST;
  return c;
}

// Returns the update, before its trust ratio, of a parameter p whose averages m and v are those of this step.
template <class V>
AK_FN V lamb_update(const LambNumbers& c, V p, V m, V v) {
  V update = m * c.inverse_bias1 / (root(v * c.inverse_bias2) + c.eps);
  if (c.decay != 0.0f) update = update + c.decay * p;
  return update;
}

// Steps averages m and v; returns the update.
template <class V>
AK_FN V lamb(const LambNumbers& c, V g, V p, V& m, V& v) {
  g = g * c.factor;
  if (c.l2 != 0.0f) g = g + c.l2 * p;
  m = c.beta1 * m + c.weight1 * g;
  v = c.beta2 * v + c.weight2 * (g * g);
  return lamb_update<V>(c, p, m, v);
}

// The trust ratio of sums of squares: |parameter| / |update|, 1 where either is 0.
AK_FN float trust_ratio(double values, double updates) {
  return values != 0.0 && updates != 0.0 ? (float)(AK_SQRT(values) / AK_SQRT(updates)) : 1.0f;
}

// -- NovoGrad --

struct NovogradNumbers {
  float factor, beta1, weight, l2, inverse, decay, lr;
};

// The averaged norm after a gradient whose norm is `norm`: of 2-norms the squares are averaged.
AK_FN float novograd_norm(const ak_novograd_args& a, float before, double norm) {
  if (a.flags & AK_FIRST) return (float)norm;
  double old = (double)before;
  if (a.flags & AK_MAX_NORM) return (float)(a.beta2 * old + (1.0 - a.beta2) * norm);
  return (float)AK_SQRT(a.beta2 * old * old + (1.0 - a.beta2) * norm * norm);
}

// After the averaged norms of this step are known.
AK_FN NovogradNumbers novograd_numbers(const ak_novograd_args& a, ak_int64 tensor) {
  NovogradNumbers c;
  double bias1 = 1.0, bias2 = 1.0;
  if (!(a.flags & AK_NO_BIAS_CORRECTION)) {
    double step = step_of(a.step, tensor);
    bias1 = 1.0 - AK_POW(a.beta1, step);
    bias2 = 1.0 - AK_POW(a.beta2, step);
  }
  bool inside = a.flags & AK_INSIDE;
  double scale = (double)*a.norms[tensor] / AK_SQRT(bias2) + a.eps;
  double factor = (double)gradient_factor(a.grad_scale);
  if (a.flags & AK_MAXIMIZE) factor = -factor;
  c.factor = (float)(inside ? factor / scale : factor);
  c.beta1 = (float)a.beta1;
  c.weight = (float)a.weight;
  c.l2 = inside ? (float)a.weight_decay : 0.0f;
  c.inverse = (float)(inside ? 1.0 / bias1 : 1.0 / (bias1 * scale));
  c.decay = inside ? 0.0f : (float)a.weight_decay;
  c.lr = a.lr_at ? *a.lr_at : (float)a.lr;
  return c;
}

// Steps parameter p and average m.
template <class V>
AK_FN void novograd(const NovogradNumbers& c, V g, V& p, V& m) {
  g = g * c.factor;
  if (c.l2 != 0.0f) g = g + c.l2 * p;
  m = c.beta1 * m + c.weight * g;
  V update = m * c.inverse;
  if (c.decay != 0.0f) update = update + c.decay * p;
  p = p - c.lr * update;
}

#endif
