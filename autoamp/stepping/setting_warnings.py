"""Warnings of settings with which training would go on and silently go wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import MODULES_OF_NORMS


def smallest_positive(dtype: torch.dtype) -> float:
    """Return the smallest number above 0 that ``dtype`` holds, subnormal ones included.

    2**(emin - precision): 2**-24 in fp16 and 2**-133 in bf16, by IEEE 754 and its bfloat16 variant.
    """
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def warn_without_gradients(name: str, params: Iterable[Tensor]) -> None:
    """Warn that no parameter of the optimizer of this name has a gradient after its block, and say why."""
    if any(param.requires_grad for param in params):
        cause = (
            "was scaled_loss.backward() not called in the block, or does the optimizer hold other parameters than the "
            "model that made the loss (it was built for a copy, or before the model was replaced or sharded)?"
        )
    else:
        cause = "all of them are frozen (requires_grad=False)"
    warn_user(f"no parameter of {name} has a gradient after scale_loss: {cause}")


def check_optimizer(optimizer: Any) -> None:
    """Warn of an ``eps`` that is 0 in the parameters' half dtype.

    Only for optimizers that step half parameters themselves: fp32 masters have no such problem, and for arithmetic in
    fp32 eps is not 0.
    """
    if getattr(optimizer, "master_weights", False) or getattr(optimizer, "computes_in_fp32", False):
        return
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        for dtype in HALF_DTYPES if isinstance(eps, float) and eps > 0 else ():
            if any(param.dtype is dtype for param in group["params"]) and not torch.tensor(eps, dtype=dtype):
                warn_user(
                    f"{type(optimizer).__name__}.param_groups[{index}]: eps={eps:g} is 0 in {dtype}, so a division by "
                    f"it gives inf; the smallest that survives is {smallest_positive(dtype):.3g}. Set eps to that or "
                    "more, or step fp32 master weights (opt_level='O2')"
                )


def check_half_norms(models: Iterable[Module]) -> None:
    """Warn of norms with running statistics that are in half precision."""
    for model in models:
        for name, module in model.named_modules():
            buffer = getattr(module, "running_var", None)
            if isinstance(module, MODULES_OF_NORMS) and isinstance(buffer, Tensor) and buffer.dtype in HALF_DTYPES:
                warn_user(
                    f"{type(module).__name__} {name!r} keeps its running statistics in {buffer.dtype}, where the "
                    "running variance overflows or stops moving; pass keep_batchnorm_fp32=True"
                )
                return


def check_half_model(models: Iterable[Module], level: str, *, masters: bool) -> None:
    """Warn of parameters that are in half precision before `initialize` has cast anything.

    Args:
        models: Those that it was given.
        level: The opt level.
        masters: Whether fp32 masters are made of them, which then begin with rounded values.
    """
    then = "makes its fp32 master of the rounded values" if masters else "steps it in half precision"
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.dtype in HALF_DTYPES:
                warn_user(
                    f"parameter {name!r} of {type(model).__name__} is in {parameter.dtype} already: its fp32 values "
                    f"are lost, and opt_level={level!r} {then}. Give initialize() the model in fp32, without .half() "
                    "or .bfloat16()"
                )
                return
