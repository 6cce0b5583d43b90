"""The structs of ``src/abi.h``, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_int64, c_uint32, c_void_p

__all__ = [
    "ABI",
    "BF16",
    "CHECK_X",
    "CHECK_Y",
    "CHUNK",
    "CPU",
    "CUDA",
    "CUDA_ERROR",
    "DECAY_AFTER",
    "DECOUPLED",
    "EPS_INSIDE",
    "EXTRA_KERNELS",
    "F16",
    "F32",
    "FIRST",
    "I32",
    "I64",
    "INSIDE",
    "KERNELS",
    "MAXIMIZE",
    "MAX_NORM",
    "NESTEROV",
    "NO_BIAS_CORRECTION",
    "NO_DTYPE",
    "PARTS",
    "RESULTS",
    "SIDE_BY_SIDE",
    "TRUST",
    "AdagradArgs",
    "AdamArgs",
    "Args",
    "AxpbyArgs",
    "GradScale",
    "Head",
    "LambArgs",
    "MergeArgs",
    "NormArgs",
    "NovogradArgs",
    "ScaleArgs",
    "SgdArgs",
    "StatisticsArgs",
    "Step",
]

ABI = 4
CHUNK = 32768
# Blocks of a GPU that share a chunk.
PARTS = 4
# Channels whose elements lie side by side that one turn of a thread takes.
SIDE_BY_SIDE = 64
CPU, CUDA = 0, 1
F32, F16, BF16, I32, I64, NO_DTYPE = 0, 1, 2, 3, 4, -1
DECOUPLED, MAXIMIZE, NO_BIAS_CORRECTION, EPS_INSIDE, NESTEROV, FIRST, DECAY_AFTER = 1, 2, 4, 8, 16, 32, 64
TRUST, MAX_NORM, INSIDE, CHECK_X, CHECK_Y = 128, 256, 512, 1024, 2048

CUDA_ERROR = 1000
RESULTS = {
    1: "its struct of arguments has another size than this package gives; reinstall autoamp-kernels",
    2: "its library is of another version than this package; reinstall autoamp-kernels",
    3: "it does not take these dtypes",
    4: "a count or a pointer is missing",
    5: "this build has no kernels for the device",
}


class Head(ctypes.Structure):
    """``ak_head``: what every struct of arguments begins with."""

    _fields_ = (
        ("size", c_uint32),
        ("version", c_uint32),
        ("device", c_int32),
        ("threads", c_int32),
        ("stream", c_void_p),
        ("module", c_void_p),
        ("tensors", c_int64),
        ("counts", c_void_p),
        ("first_chunk", c_void_p),
        ("found_inf", c_void_p),
    )


class GradScale(ctypes.Structure):
    """``ak_grad_scale``: what gradients are multiplied by."""

    _fields_ = (("number", c_double), ("factor", c_void_p), ("scale", c_void_p))


class Step(ctypes.Structure):
    """``ak_step``: the count of steps."""

    _fields_ = (
        ("number", c_double),
        ("one", c_void_p),
        ("each", c_void_p),
        ("dtype", c_int32),
        ("advance", c_int32),
    )


class Args(ctypes.Structure):
    """What all structs of arguments have in common; each begins with the field ``head``."""

    head: Head


class AdamArgs(Args):
    """``ak_adam_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        ("step", Step),
        ("grads", c_void_p),
        ("params", c_void_p),
        ("exp_avgs", c_void_p),
        ("exp_avg_sqs", c_void_p),
        ("max_exp_avg_sqs", c_void_p),
        ("halves", c_void_p),
        ("lr_at", c_void_p),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_dtype", c_int32),
        ("param_dtype", c_int32),
        ("half_dtype", c_int32),
        ("flags", c_int32),
    )


_LISTS = (("grads", c_void_p), ("params", c_void_p))
_DTYPES = (("grad_dtype", c_int32), ("param_dtype", c_int32), ("half_dtype", c_int32), ("flags", c_int32))


class SgdArgs(Args):
    """``ak_sgd_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        *_LISTS,
        ("buffers", c_void_p),
        ("halves", c_void_p),
        ("lr_at", c_void_p),
        ("lr", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("weight_decay", c_double),
        *_DTYPES,
    )


class AdagradArgs(Args):
    """``ak_adagrad_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        *_LISTS,
        ("sums", c_void_p),
        ("halves", c_void_p),
        ("lr_at", c_void_p),
        ("lr", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        *_DTYPES,
    )


_LAYERWISE = tuple((name, c_double) for name in ("lr", "beta1", "beta2", "weight", "eps", "weight_decay"))


class LambArgs(Args):
    """``ak_lamb_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        ("step", Step),
        *_LISTS,
        ("exp_avgs", c_void_p),
        ("exp_avg_sqs", c_void_p),
        ("halves", c_void_p),
        ("lr_at", c_void_p),
        ("global_norm", c_void_p),
        ("partial", c_void_p),
        ("ratios", c_void_p),
        *_LAYERWISE,
        ("max_norm", c_double),
        *_DTYPES,
    )


class NovogradArgs(Args):
    """``ak_novograd_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        ("step", Step),
        *_LISTS,
        ("exp_avgs", c_void_p),
        ("halves", c_void_p),
        ("norms", c_void_p),
        ("lr_at", c_void_p),
        ("partial", c_void_p),
        *_LAYERWISE,
        *_DTYPES,
    )


class AxpbyArgs(Args):
    """``ak_axpby_args``."""

    _fields_ = (
        ("head", Head),
        ("x_scale", GradScale),
        ("xs", c_void_p),
        ("ys", c_void_p),
        ("outs", c_void_p),
        ("found", c_void_p),
        ("b", c_double),
        ("x_dtype", c_int32),
        ("y_dtype", c_int32),
        ("out_dtype", c_int32),
        ("flags", c_int32),
    )


class ScaleArgs(Args):
    """``ak_scale_args``."""

    _fields_ = (
        ("head", Head),
        ("grad_scale", GradScale),
        ("ins", c_void_p),
        ("outs", c_void_p),
        ("found", c_void_p),
        ("partial", c_void_p),
        ("norms", c_void_p),
        ("total", c_void_p),
        ("in_dtype", c_int32),
        ("out_dtype", c_int32),
        ("flags", c_int32),
        ("unused", c_int32),
    )


class NormArgs(Args):
    """``ak_norm_args``."""

    _fields_ = (
        ("head", Head),
        ("rows", c_int64),
        ("columns", c_int64),
        ("rows_at_once", c_int64),
        ("grad", c_void_p),
        ("input", c_void_p),
        ("means", c_void_p),
        ("rstds", c_void_p),
        ("weight", c_void_p),
        ("grad_in", c_void_p),
        ("grad_weight", c_void_p),
        ("grad_bias", c_void_p),
        ("partial", c_void_p),
        ("grad_dtype", c_int32),
        ("in_dtype", c_int32),
    )


class StatisticsArgs(Args):
    """``ak_statistics_args``."""

    _fields_ = (
        ("head", Head),
        ("outer", c_int64),
        ("channels", c_int64),
        ("inner", c_int64),
        ("pieces", c_int64),
        ("input", c_void_p),
        ("partial", c_void_p),
        ("means", c_void_p),
        ("variances", c_void_p),
        ("in_dtype", c_int32),
        ("unused", c_int32),
    )


class MergeArgs(Args):
    """``ak_merge_args``."""

    _fields_ = (
        ("head", Head),
        ("parts", c_int64),
        ("channels", c_int64),
        ("means", c_void_p),
        ("variances", c_void_p),
        ("counts", c_void_p),
        ("mean", c_void_p),
        ("variance", c_void_p),
        ("count", c_void_p),
    )


# The function of the library and the struct that it takes, by the kernel's name.
KERNELS: dict[str, type[Args]] = {
    "adam": AdamArgs, "sgd": SgdArgs, "adagrad": AdagradArgs, "lamb": LambArgs, "novograd": NovogradArgs,
    "axpby": AxpbyArgs, "scale": ScaleArgs, "norm": NormArgs, "statistics": StatisticsArgs, "merge": MergeArgs,
}  # fmt: skip

# Kernels that a kernel launches on CUDA beside its own, each with the fields of its struct that hold their dtypes.
EXTRA_KERNELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "lamb": (("lamb_last", ("param_dtype", "half_dtype")),),
    "novograd": (("scale", ("grad_dtype", "")),),
}
