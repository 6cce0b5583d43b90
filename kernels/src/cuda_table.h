// What the launcher passes to the CUDA kernels: the arguments, and a table of tensors, by value.
//
// Included by the launcher (g++), by nvcc and by NVRTC, which must lay these structs out alike. A table that travels
// with the launch needs no memory on the device, no copy and no wait, and a captured graph keeps it.
#ifndef AUTOAMP_KERNELS_CUDA_TABLE_H
#define AUTOAMP_KERNELS_CUDA_TABLE_H

#include "abi.h"

#define AK_CUDA_THREADS 512
#define AK_WARP 32
#define AK_WARPS (AK_CUDA_THREADS / AK_WARP)

// Columns of a norm up to which a warp does a row; of more a block does.
#define AK_NORM_COLUMNS 1024

// Elements of one block.
#define AK_CUDA_PART (AK_CHUNK / AK_PARTS)

// Bytes of parameters that a kernel may have, from CUDA 12.1 on.
#define AK_CUDA_PARAMS 32764

// Some tensors of a call, a row for each; COLUMNS pointers in a row.
template <class Args, int COLUMNS>
struct ak_launch {
  static const int WIDTH = COLUMNS;
  static const int ROWS = (AK_CUDA_PARAMS - 32 - (int)sizeof(Args)) / (8 * COLUMNS + 8 + 4);
  Args args;              // its tables of pointers are the host's: not to be read by a kernel
  ak_int64 first_tensor;  // tensors of the call before this launch's
  ak_int64 first_part;    // parts of those
  ak_int32 rows;
  ak_uint32 first_block[ROWS + 1];
  ak_int64 counts[ROWS];
  void* pointers[COLUMNS][ROWS];
};

// The columns of the optimizers, of `scale` and of `axpby`.
enum { AK_GRADS, AK_PARAMS, AK_HALVES, AK_STATE1, AK_STATE2, AK_STATE3 };
enum { AK_LAMB_STEPS = 5, AK_NOVOGRAD_STEPS = 5, AK_ADAM_STEPS = 6 };
enum { AK_INS, AK_OUTS };
enum { AK_XS, AK_YS, AK_SUMS };

typedef ak_launch<ak_adam_args, 7> ak_adam_launch;
typedef ak_launch<ak_sgd_args, 4> ak_sgd_launch;
typedef ak_launch<ak_adagrad_args, 4> ak_adagrad_launch;
typedef ak_launch<ak_lamb_args, 6> ak_lamb_launch;
typedef ak_launch<ak_novograd_args, 6> ak_novograd_launch;
typedef ak_launch<ak_scale_args, 2> ak_scale_launch;
typedef ak_launch<ak_axpby_args, 3> ak_axpby_launch;

// Counts of steps that go up by 1: one in args.step.one, or the rows' only column.
struct ak_advance_args {
  ak_step step;
  const float* found_inf;
};
typedef ak_launch<ak_advance_args, 1> ak_advance_launch;

template <class Launch>
struct ak_fits {
  static_assert(sizeof(Launch) <= AK_CUDA_PARAMS, "a kernel's parameters must fit into 32,764 bytes");
  static_assert(Launch::ROWS >= 400, "400 tensors must go by one launch");
};
template struct ak_fits<ak_adam_launch>;
template struct ak_fits<ak_sgd_launch>;
template struct ak_fits<ak_adagrad_launch>;
template struct ak_fits<ak_lamb_launch>;
template struct ak_fits<ak_novograd_launch>;
template struct ak_fits<ak_scale_launch>;
template struct ak_fits<ak_axpby_launch>;
template struct ak_fits<ak_advance_launch>;

// One layout, whoever compiles.
static_assert(sizeof(ak_head) == 64 && sizeof(ak_grad_scale) == 24 && sizeof(ak_step) == 32, "the ABI's layout");
static_assert(sizeof(void*) == 8 && sizeof(ak_int64) == 8, "64-bit pointers");

#endif
