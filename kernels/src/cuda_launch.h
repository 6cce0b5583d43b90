// The kernels of abi.h on a GPU. Arguments have been checked, dtypes too.
#ifndef AUTOAMP_KERNELS_CUDA_LAUNCH_H
#define AUTOAMP_KERNELS_CUDA_LAUNCH_H

#include "abi.h"

int cuda_adam(const ak_adam_args& args);
int cuda_sgd(const ak_sgd_args& args);
int cuda_adagrad(const ak_adagrad_args& args);
int cuda_lamb(const ak_lamb_args& args);
int cuda_novograd(const ak_novograd_args& args);
int cuda_axpby(const ak_axpby_args& args);
int cuda_scale(const ak_scale_args& args);
int cuda_norm(const ak_norm_args& args);
int cuda_statistics(const ak_statistics_args& args);
int cuda_merge(const ak_merge_args& args);

#endif
