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

// 1 - beta^step of both averages, or 1 where they are not corrected.
struct Biases {
  double first, second;
};

template <class Args>
AK_FN Biases biases_of(const Args& a, ak_int64 tensor) {
  if (a.flags & AK_NO_BIAS_CORRECTION) return Biases{1.0, 1.0};
  double step = step_of(a.step, tensor);
  return Biases{1.0 - AK_POW(a.beta1, step), 1.0 - AK_POW(a.beta2, step)};
}

// What a gradient is multiplied by, its sign turned where the flags say so.
template <class Args>
AK_FN float signed_factor(const Args& a) {
  float factor = gradient_factor(a.grad_scale);
  return (a.flags & AK_MAXIMIZE) ? -factor : factor;
}

template <class Args>
AK_FN float rate_of(const Args& a) {
  return a.lr_at ? *a.lr_at : (float)a.lr;
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
  Biases bias = biases_of(a, tensor);
  bool decoupled = a.flags & AK_DECOUPLED;
  c.factor = signed_factor(a);
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.shrink = decoupled ? (float)(1.0 - lr * a.weight_decay) : 1.0f;
  c.weight1 = (float)(1.0 - a.beta1);
  c.beta2 = (float)a.beta2;
  c.weight2 = (float)(1.0 - a.beta2);
  c.inverse_bias2 = (float)(1.0 / bias.second);
  c.size = (float)(lr / bias.first);
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
  c.factor = signed_factor(a);
  c.lr = rate_of(a);
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
  c.factor = signed_factor(a);
  c.lr = rate_of(a);
  c.eps = (float)a.eps;
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.decoupled = decoupled ? (float)a.weight_decay : 0.0f;
  return c;
}

template <class V>
AK_FN void one_state_step(const AdagradNumbers& c, V g, V& p, V& sum) {
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
  Biases bias = biases_of(a, tensor);
  bool decoupled = a.flags & AK_DECOUPLED;
  c.factor = signed_factor(a);
  if (a.global_norm && a.max_norm > 0.0) {
    double excess = (double)*a.global_norm / a.max_norm;
    // A norm of nan makes all of it nan.
    if (!(excess <= 1.0)) c.factor = (float)((double)c.factor / excess);
  }
  c.l2 = decoupled ? 0.0f : (float)a.weight_decay;
  c.decay = decoupled ? (float)a.weight_decay : 0.0f;
  c.beta1 = (float)a.beta1;
  c.weight1 = (float)a.weight;
  c.beta2 = (float)a.beta2;
  c.weight2 = (float)(1.0 - a.beta2);
  c.inverse_bias1 = (float)(1.0 / bias.first);
  c.inverse_bias2 = (float)(1.0 / bias.second);
  c.eps = (float)a.eps;
  c.lr = rate_of(a);
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
  Biases bias = biases_of(a, tensor);
  bool inside = a.flags & AK_INSIDE;
  double scale = (double)*a.norms[tensor] / AK_SQRT(bias.second) + a.eps;
  double factor = (double)signed_factor(a);
  c.factor = (float)(inside ? factor / scale : factor);
  c.beta1 = (float)a.beta1;
  c.weight = (float)a.weight;
  c.l2 = inside ? (float)a.weight_decay : 0.0f;
  c.inverse = (float)(inside ? 1.0 / bias.first : 1.0 / (bias.first * scale));
  c.decay = inside ? 0.0f : (float)a.weight_decay;
  c.lr = rate_of(a);
  return c;
}

// Steps parameter p and average m.
template <class V>
AK_FN void one_state_step(const NovogradNumbers& c, V g, V& p, V& m) {
  g = g * c.factor;
  if (c.l2 != 0.0f) g = g + c.l2 * p;
  m = c.beta1 * m + c.weight * g;
  V update = m * c.inverse;
  if (c.decay != 0.0f) update = update + c.decay * p;
  p = p - c.lr * update;
}

// -- backward of norms --

struct NormRow {
  float mean, rstd;        // the mean is 0 of an RMS norm
  float of_g, of_product;  // means over the row of g = grad * weight, and of g times the normalised input
};

AK_FN NormRow norm_row(const ak_norm_args& a, ak_int64 row) {
  return NormRow{a.means ? a.means[row] : 0.0f, a.rstds[row], 0.0f, 0.0f};
}

// Takes the sums of g and of g times the normalised input.
AK_FN void norm_means(const ak_norm_args& a, NormRow& row, double of_g, double of_product) {
  row.of_g = a.means ? (float)(of_g / (double)a.columns) : 0.0f;
  row.of_product = (float)(of_product / (double)a.columns);
}

template <class V>
AK_FN V normalised(const NormRow& row, V x) {
  return (x - row.mean) * row.rstd;
}

template <class V>
AK_FN V norm_gradient(const NormRow& row, V x, V g) {
  return row.rstd * (g - row.of_g - normalised<V>(row, x) * row.of_product);
}

// -- statistics of channels --

struct Moments {
  double count, mean, squares;  // the sum of squared deviations from the mean
};

AK_FN void put_together(Moments& all, const Moments& other) {
  if (other.count == 0.0) return;
  double count = all.count + other.count, apart = other.mean - all.mean;
  all.mean += apart * (other.count / count);
  all.squares += other.squares + apart * apart * (all.count * (other.count / count));
  all.count = count;
}

AK_FN float variance_of(const Moments& m) { return (float)(m.squares / m.count); }

// Of no elements it is nan, as the variance is.
AK_FN float mean_of(const Moments& m) { return m.count == 0.0 ? variance_of(m) : (float)m.mean; }

AK_FN Moments merged(const ak_merge_args& a, ak_int64 channel) {
  Moments all = {0.0, 0.0, 0.0};
  for (ak_int64 part = 0; part < a.parts; part++) {
    ak_int64 at = part * a.channels + channel;
    double count = (double)a.counts[part];
    // A variance of no elements is nan, and counts for nothing.
    put_together(all, Moments{count, (double)a.means[at], (double)a.variances[at] * count});
  }
  return all;
}

AK_FN Moments merged(const ak_statistics_args& a, ak_int64 channel) {
  Moments all = {0.0, 0.0, 0.0};
  for (ak_int64 piece = 0; piece < a.pieces; piece++) {
    const double* at = a.partial + 3 * (piece * a.channels + channel);
    put_together(all, Moments{at[0], at[1], at[2]});
  }
  return all;
}

#endif
