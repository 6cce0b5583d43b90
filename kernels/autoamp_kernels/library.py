"""The compiled library, loaded by ctypes: the structs of ``src/kernels.h``, what it offers, and calls of it."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CHUNK", "LISTS", "ArgumentError", "Backend", "KernelError", "StepArgs", "backends", "call",
]  # fmt: skip

VERSION = 5
CHUNK = 8192
LISTS = ("grads", "params", "halves", "state1", "state2")

# The kernels of each type of device. On a CPU the others were measured to gain less than 10 % of a training step.
OFFERED = {"cpu": ("lamb_",), "cuda": ("adam_", "lamb_", "sgd_")}


class KernelError(RuntimeError):
    """A kernel could not run: there is none for the device, or the library or the device refused the call."""


class ArgumentError(ValueError):
    """Tensors that a kernel cannot take. Nothing was launched and nothing was written."""


class StepArgs(ctypes.Structure):
    """``StepArgs``: one step of many tensors."""

    _fields_ = (
        *((name, c_int32) for name in ("device", "threads", "grad_dtype", "param_dtype", "half_dtype", "step_dtype")),
        *((name, c_int32) for name in ("flags", "unused")),
        *((name, c_int64) for name in ("tensors", "chunks")),
        *((name, c_void_p) for name in ("counts", "first_chunk")),
        *((name, c_void_p) for name in LISTS),
        *((name, c_void_p) for name in ("stream", "found_inf", "lr_at", "step_at", "global_norm", "space")),
        *((name, c_double) for name in ("inv_scale", "lr", "beta1", "beta2", "weight", "eps", "weight_decay")),
        *((name, c_double) for name in ("max_norm", "step")),
    )


@dataclass(frozen=True)
class Backend:
    """What can run on devices of a type.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        kernels: The names of the kernels that run there; none where there is a problem.
        reason: The problem and what helps; without one the names of the kernels.
    """

    device_type: str
    kernels: tuple[str, ...]
    reason: str


@functools.cache
def _loaded() -> Any:
    """Return the library, or a string: why there is none."""
    if os.environ.get("AUTOAMP_KERNELS") == "0":
        return "the kernels are turned off by AUTOAMP_KERNELS=0; unset it"
    path = Path(os.environ.get("AUTOAMP_KERNELS_LIBRARY", Path(__file__).with_name("libautoamp_kernels.so")))
    if not path.is_file():
        return f"{path} is missing; install autoamp-kernels by `pip install ./kernels`"
    try:
        library = ctypes.CDLL(str(path))
        version = library.ak_version()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}; reinstall autoamp-kernels"
    if version != VERSION:
        return f"{path} has version {version}, not {VERSION}; reinstall autoamp-kernels"
    if hasattr(library, "ak_cuda_problem"):
        library.ak_cuda_problem.restype = library.ak_cuda_message.restype = ctypes.c_char_p
    return library


def backends() -> tuple[Backend, ...]:
    """Return what can run on CPUs and on GPUs. This starts the CUDA driver, where the library has kernels for it."""
    library = _loaded()
    problems = {"cpu": library, "cuda": library} if isinstance(library, str) else {"cuda": _cuda_problem(library)}
    return tuple(
        Backend(kind, () if problems.get(kind) else names, problems.get(kind) or ", ".join(names))
        for kind, names in OFFERED.items()
    )


def _cuda_problem(library: Any) -> str:
    if not hasattr(library, "ak_cuda_problem"):
        return "built without nvcc: put it on PATH or set CUDA_HOME, and reinstall autoamp-kernels"
    return str(library.ak_cuda_problem().decode(errors="replace"))


def call(device_type: str, kernel: str, args: ctypes.Structure) -> None:
    """Run a kernel.

    Raises:
        KernelError: There is none for the device, or it failed. The message names the kernel.
    """
    library = _loaded()
    function = getattr(library, f"ak_{device_type}_{kernel}", None)
    if function is None:
        raise KernelError(f"kernel {kernel}: " + (library if isinstance(library, str) else f"none for {device_type}"))
    result = function(ctypes.byref(args))
    if result:
        reason = "it does not take these dtypes" if result == 1 else library.ak_cuda_message().decode(errors="replace")
        raise KernelError(f"kernel {kernel}: {reason}")
