// The C ABI of autoamp_kernels: one struct of arguments per kernel, one function per kernel.
//
// Every struct begins with `ak_head`, whose first two fields are the size of the whole struct and the version of this
// header, as the caller knows them: a caller from another build is told so, and nothing is read or written. Pointers to
// tables are on the host; what a table points to is on the device of the call. Nothing here allocates device memory or
// waits for a device.
#ifndef AUTOAMP_KERNELS_ABI_H
#define AUTOAMP_KERNELS_ABI_H

// NVRTC has no standard headers.
typedef int ak_int32;
typedef unsigned int ak_uint32;
typedef unsigned short ak_uint16;
typedef long long ak_int64;

#define AK_ABI 4

// Elements that one block, or one turn of a thread, takes of one tensor.
#define AK_CHUNK 32768

// Blocks of a GPU that share a chunk.
#define AK_PARTS 4

// Columns of sums over rows, and channels whose elements lie side by side, that one turn of a thread takes.
#define AK_SUMMED 256
#define AK_SIDE_BY_SIDE 64

enum { AK_F32 = 0, AK_F16 = 1, AK_BF16 = 2, AK_I32 = 3, AK_I64 = 4, AK_NO_DTYPE = -1 };

enum { AK_CPU = 0, AK_CUDA = 1 };

// What a function returns. From AK_CUDA_ERROR on it is AK_CUDA_ERROR + the driver's CUresult.
enum {
  AK_OK = 0,
  AK_WRONG_SIZE = 1,     // head.size is not the size of the struct
  AK_WRONG_VERSION = 2,  // head.version is not AK_ABI
  AK_WRONG_DTYPE = 3,    // no kernel for these dtypes
  AK_WRONG_VALUE = 4,    // a count is negative, or a pointer that is needed is NULL
  AK_NO_DEVICE = 5,      // this build has no kernels for head.device
  AK_CUDA_ERROR = 1000
};

typedef struct ak_head {
  ak_uint32 size;
  ak_uint32 version;
  ak_int32 device;   // AK_CPU or AK_CUDA
  ak_int32 threads;  // of the CPU; 1 or more
  void* stream;      // a CUstream
  void* module;      // what ak_cuda_open gave
  ak_int64 tensors;
  const ak_int64* counts;       // [tensors] elements of each
  const ak_int64* first_chunk;  // [tensors + 1] sums of ceil(count / AK_CHUNK), from 0
  const float* found_inf;       // NULL, or one element: unless it is 0 nothing is written
} ak_head;

// What a gradient is multiplied by before anything else: number * *factor / *scale; NULL counts as 1.
typedef struct ak_grad_scale {
  double number;
  const float* factor;
  const float* scale;
} ak_grad_scale;

// A count of steps: a number, one element on the device, or one fp32 element for each tensor (as torch.optim keeps).
typedef struct ak_step {
  double number;
  void* one;           // NULL, or of `dtype`: AK_F32, AK_I32 or AK_I64
  float* const* each;  // NULL, or [tensors]
  ak_int32 dtype;
  ak_int32 advance;  // whether the counts on the device are increased by 1 first, unless found_inf
} ak_step;

enum {
  AK_DECOUPLED = 1,           // the decay is AdamW's; if not, it is added to the gradient
  AK_MAXIMIZE = 2,            // the gradient's sign is turned
  AK_NO_BIAS_CORRECTION = 4,  // averages are not divided by 1 - beta^step
  AK_EPS_INSIDE = 8,          // eps is added under the root
  AK_NESTEROV = 16,           // Nesterov's momentum
  AK_FIRST = 32,              // the buffers hold nothing yet: the first gradient is the first velocity
  AK_DECAY_AFTER = 64,        // the decay is added to the velocity
  AK_TRUST = 128,             // updates are multiplied by LAMB's trust ratios
  AK_MAX_NORM = 256,          // norms are the largest absolute values, not 2-norms
  AK_INSIDE = 512,            // gradients are normalised, and the decay added, before they enter NovoGrad's average
  AK_CHECK_X = 1024,          // look for inf and nan in x
  AK_CHECK_Y = 2048,          // and in y
};

// Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1), AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101,
// algorithm 2), AMSGrad (Reddi et al. 2018, arXiv:1904.09237, algorithm 2) as torch.optim has it.
typedef struct ak_adam_args {
  ak_head head;
  ak_grad_scale grad_scale;
  ak_step step;
  const void* const* grads;       // of grad_dtype
  void* const* params;            // of param_dtype
  float* const* exp_avgs;
  float* const* exp_avg_sqs;
  float* const* max_exp_avg_sqs;  // NULL without AMSGrad
  void* const* halves;            // of half_dtype: set to the new parameters; NULL where half_dtype is AK_NO_DTYPE
  const float* lr_at;             // NULL, or one element, which counts instead of lr
  double lr, beta1, beta2, eps, weight_decay;
  ak_int32 grad_dtype, param_dtype, half_dtype;
  ak_int32 flags;
} ak_adam_args;

// SGD with momentum (Sutskever et al. 2013, ICML 28, p. 1139) as torch.optim.SGD has it.
typedef struct ak_sgd_args {
  ak_head head;
  ak_grad_scale grad_scale;
  const void* const* grads;
  void* const* params;
  float* const* buffers;  // NULL without momentum
  void* const* halves;
  const float* lr_at;
  double lr, momentum, dampening, weight_decay;
  ak_int32 grad_dtype, param_dtype, half_dtype;
  ak_int32 flags;
} ak_sgd_args;

// Adagrad (Duchi, Hazan and Singer 2011, JMLR 12, p. 2121, figure 1, diagonal matrices) as torch.optim.Adagrad has it.
typedef struct ak_adagrad_args {
  ak_head head;
  ak_grad_scale grad_scale;
  const void* const* grads;
  void* const* params;
  float* const* sums;
  void* const* halves;
  const float* lr_at;
  double lr, eps, weight_decay;
  ak_int32 grad_dtype, param_dtype, half_dtype;
  ak_int32 flags;
} ak_adagrad_args;

// LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2, where phi is the identity), after clipping by the global norm.
//
// Two passes: the first writes the averages and sums squares, the second computes the updates again from the averages
// (which moves as many bytes as keeping them would) and writes the parameters. Without AK_TRUST the first does all.
typedef struct ak_lamb_args {
  ak_head head;
  ak_grad_scale grad_scale;
  ak_step step;
  const void* const* grads;
  void* const* params;
  float* const* exp_avgs;
  float* const* exp_avg_sqs;
  void* const* halves;
  const float* lr_at;
  const float* global_norm;  // NULL, or one element: the 2-norm of all gradients, after grad_scale
  // Space for sums of squares, of parameters and updates in turn, [2 * chunks], on CUDA [2 * AK_PARTS * chunks]; NULL
  // without AK_TRUST.
  double* partial;
  float* ratios;             // [tensors] space for trust ratios; NULL without AK_TRUST
  double lr, beta1, beta2, weight, eps, weight_decay;  // `weight` is that of a gradient in its average
  double max_norm;           // gradients are divided by global_norm / max_norm where that is above 1; 0 for never
  ak_int32 grad_dtype, param_dtype, half_dtype;
  ak_int32 flags;
} ak_lamb_args;

// NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1).
//
// Two passes: the first takes each gradient's norm, the second steps. With AK_FIRST the averaged norms hold nothing yet.
typedef struct ak_novograd_args {
  ak_head head;
  ak_grad_scale grad_scale;
  ak_step step;
  const void* const* grads;
  void* const* params;
  float* const* exp_avgs;
  void* const* halves;
  float* const* norms;  // [tensors] of one element: the averaged norm of each gradient
  const float* lr_at;
  double* partial;      // [chunks] space, on CUDA [tensors + AK_PARTS * chunks]
  double lr, beta1, beta2, weight, eps, weight_decay;  // `weight` is that of a gradient in its average
  ak_int32 grad_dtype, param_dtype, half_dtype;
  ak_int32 flags;
} ak_novograd_args;

// out = factor * x + b * y, computed in fp32, and whether x or y holds inf or nan.
typedef struct ak_axpby_args {
  ak_head head;
  ak_grad_scale x_scale;  // the factor of x
  const void* const* xs;
  const void* const* ys;
  void* const* outs;  // may be `ys` where the dtypes are the same
  float* found;       // NULL, or one element: set to 1 where an inf or nan is found, else left as it is
  double b;
  ak_int32 x_dtype, y_dtype, out_dtype;
  ak_int32 flags;  // AK_CHECK_X, AK_CHECK_Y
} ak_axpby_args;

// One read of tensors: out = factor * in, whether any in is inf or nan, and norms of factor * in.
typedef struct ak_scale_args {
  ak_head head;
  ak_grad_scale grad_scale;
  const void* const* ins;  // of in_dtype
  void* const* outs;       // of out_dtype; NULL where it is AK_NO_DTYPE; may be `ins` where the dtypes are the same
  float* found;            // NULL, or one element: set to 1 where an inf or nan is found, else left as it is
  // NULL without norms, or space for sums of squares or largest absolute values, [chunks]; on CUDA
  // [tensors + AK_PARTS * chunks].
  double* partial;
  float* norms;            // NULL, or [tensors]
  float* total;            // NULL, or one element: the norm of all
  ak_int32 in_dtype, out_dtype;
  ak_int32 flags;  // AK_MAX_NORM
  ak_int32 unused;
} ak_scale_args;

// Backward of a layer norm (Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4) or of an RMS norm (Zhang and
// Sennrich 2019, arXiv:1910.07467, equation 4), over the columns of each row. With x^ = (x - mean) * rstd and
// g = grad * weight:
//   grad_in = rstd * (g - mean of g - x^ * mean of g * x^), of an RMS norm without the mean of g;
//   grad_weight = sum over rows of grad * x^, grad_bias = sum over rows of grad.
typedef struct ak_norm_args {
  ak_head head;  // of no tensors
  ak_int64 rows, columns;
  ak_int64 rows_at_once;  // rows that one block of sums over rows takes
  const void* grad;       // [rows, columns], of grad_dtype
  const void* in;         // [rows, columns], of in_dtype
  const float* means;     // [rows]; NULL of an RMS norm
  const float* rstds;     // [rows]
  const float* weight;    // NULL for 1, or [columns]
  void* grad_in;          // NULL, or [rows, columns], of in_dtype
  float* grad_weight;     // NULL, or [columns]
  float* grad_bias;       // NULL, or [columns]
  float* partial;         // NULL without these two, or space, [ceil(rows / rows_at_once), 2, columns]
  ak_int32 grad_dtype, in_dtype;
} ak_norm_args;

// Mean and biased variance of each channel of [outer, channels, inner]: by blocks, which are put together by the formula
// of Chan, Golub and LeVeque 1979 (STAN-CS-79-773, equation 2.1); within a thread of a GPU by that of Welford 1962
// (Technometrics 4, p. 419). Where there are no elements both are nan.
typedef struct ak_statistics_args {
  ak_head head;  // of no tensors
  ak_int64 outer, channels, inner;
  ak_int64 pieces;   // into which `outer` is cut
  const void* in;    // of in_dtype
  double* partial;   // space, [pieces, channels, 3]: count, mean, sum of squared deviations
  float* means;      // [channels]
  float* variances;  // [channels]
  ak_int32 in_dtype, unused;
} ak_statistics_args;

// Statistics of several batches, such as those of all processes, put together by the same formula.
typedef struct ak_merge_args {
  ak_head head;  // of no tensors
  ak_int64 parts, channels;
  const float* means;      // [parts, channels]
  const float* variances;  // [parts, channels], biased
  const float* counts;     // [parts]
  float* mean;             // [channels]
  float* variance;         // [channels], biased
  float* count;            // one element
} ak_merge_args;

#if !defined(__CUDACC__)
#ifdef __cplusplus
extern "C" {
#endif
ak_uint32 ak_abi(void);
ak_int64 ak_chunk(void);
// The CPU variant in use, such as "avx512"; never NULL.
const char* ak_cpu_variant(void);
// Use another variant: "plain", "avx2" or "avx512". Returns 0, or AK_NO_DEVICE where this CPU cannot run it.
int ak_use_cpu_variant(const char* name);
// Which of `count` pieces of memory is the first that shares bytes with one of `written` others; -1 for none. The others
// are in the order of their addresses, none is empty, and each begins where the one before ends, or behind it.
ak_int64 ak_shared(const ak_int64* begins, const ak_int64* sizes, ak_int64 count, const ak_int64* written_begins,
                   const ak_int64* written_ends, ak_int64 written);
int ak_adam(const ak_adam_args* args);
int ak_sgd(const ak_sgd_args* args);
int ak_adagrad(const ak_adagrad_args* args);
int ak_lamb(const ak_lamb_args* args);
int ak_novograd(const ak_novograd_args* args);
int ak_axpby(const ak_axpby_args* args);
int ak_scale(const ak_scale_args* args);
int ak_norm(const ak_norm_args* args);
int ak_statistics(const ak_statistics_args* args);
int ak_merge(const ak_merge_args* args);
#ifdef __cplusplus
}
#endif
#endif

#endif
