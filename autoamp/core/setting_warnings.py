"""Warnings of settings with which training would go on and silently go wrong, of losses that nobody scales, and of
buffers that a skipped step leaves with inf or nan.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core.attach import living_optimizers_and_modules
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import MODULES_OF_NORMS

logger = logging.getLogger(__name__)

# Of an optimizer whose losses nobody scales these steps are looked at, each of which waits for the device.
_STEPS = frozenset({1, 10, 100, 1000})


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
                info = torch.finfo(dtype)
                # Subnormal numbers included: 2**-24 in fp16 and 2**-133 in bf16.
                smallest = info.smallest_normal * info.eps
                warn_user(
                    f"{type(optimizer).__name__}.param_groups[{index}]: eps={eps:g} is 0 in {dtype}, so a division by "
                    f"it gives inf; the smallest that survives is {smallest:.3g}. Set eps to that or "
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


class UnderflowWatch:
    """Warns once of fp16 gradients that vanish, as nobody scales the loss. For optimizers without a loss scale."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._said = False

    def look(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """Look at the gradients that an optimizer is about to step by, at some of its steps."""
        if self._said:
            return
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step not in _STEPS:
            return
        found = _share_that_vanishes(params)
        if found is not None:
            self._said = True
            name = type(optimizer).__name__
            warn_user(
                f"{found:.0%} of {name}'s gradients underflow in fp16 (0, or below "
                f"{torch.finfo(torch.float16).tiny:.2g}), and the loss is not scaled. Scale it with "
                "`with handle.scale_loss(loss, optimizer) as scaled_loss`, call handle.auto_scale(), or use bf16"
            )


def _share_that_vanishes(params: Iterable[Tensor]) -> float | None:
    """Return the part of all gradients that fp16 does not hold in full, where it is most of those that are not 0."""
    least = torch.finfo(torch.float16).tiny
    grads = [param.grad for param in params if param.grad is not None]
    dense = [grad.detach() for grad in grads if grad.layout is torch.strided and grad.is_floating_point()]
    if not dense:
        return None
    held = torch.stack([(~(grad.abs() < least)).sum().cpu() for grad in dense]).sum().item()
    some = torch.stack([(grad != 0).sum().cpu() for grad in dense]).sum().item()
    every = sum(grad.numel() for grad in dense)
    return None if held * 2 >= some > 0 or not every else 1 - held / every


class BufferWatch:
    """Tells once of buffers, such as running statistics, in which the batch of a skipped step has left inf or nan.

    A skipped step leaves parameters as they were. Buffers were written in the forward pass, before anybody knew.
    """

    def __init__(self) -> None:
        self._said = False

    def look(self) -> None:
        """Look at the buffers of all modules that live and train. Called at a skip; waits for the device."""
        if self._said:
            return
        _, modules = living_optimizers_and_modules()
        found = {module: names for module in modules if (names := _nonfinite_buffers(module))}
        if not found:
            return
        self._said = True
        paths = _paths(modules, found)
        shown = [f"{paths[module]}.{name}" for module, names in found.items() for name in names]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        logger.warning(
            "a skipped step has left inf or nan in buffers: %s%s. A skip keeps parameters as they were, but forward "
            "has written these buffers, and model.eval() gives inf or nan by them. Call reset_running_stats() on the "
            "modules, or load an earlier checkpoint. If the batch is finite in fp32, run the layers before them in "
            "fp32, by a path under [modules] of a list or by handle.override(module, 'fp32')",
            ", ".join(shown[:4]), more,
        )  # fmt: skip


def _nonfinite_buffers(module: Module) -> list[str]:
    """Return the names of a module's own buffers in which a forward pass has left inf or nan, as far as one can tell.

    A buffer of another module than a norm may be made with inf, as a mask of attention is, so nan alone counts there.
    """
    found: list[str] = []
    # A module that is half built answers nothing, and a lazy one has no values.
    with contextlib.suppress(Exception):
        for name, buffer in module.named_buffers(recurse=False) if module.training else ():
            if buffer.is_floating_point():
                is_statistic = isinstance(module, MODULES_OF_NORMS) or name.startswith("running_")
                is_bad = ~buffer.isfinite() if is_statistic else buffer.isnan()
                found += [name] if bool(is_bad.any()) else []
    return found


def _paths(modules: Iterable[Module], wanted: Iterable[Module]) -> dict[Module, str]:
    """Return the path of each wanted module from the outermost one that has it."""
    paths = {module: type(module).__name__ for module in wanted}
    for outer in modules:
        with contextlib.suppress(Exception):
            for name, module in outer.named_modules():
                whole = f"{type(outer).__name__}.{name}"
                if name and module in paths and whole.count(".") > paths[module].count("."):
                    paths[module] = whole
    return paths
