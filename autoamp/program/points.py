"""Where torch is patched, so that events are heard."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from autoamp import torch_private
from autoamp.patching import PatchSet, imitate, original_of
from autoamp.program.events import Subscriber

LATE_MODULES = ("torch.distributed.fsdp.sharded_grad_scaler", "torch.distributed.checkpoint.state_dict")
"""The modules with a point that torch does not import itself."""

Hears = Sequence[Callable[..., Any]]
"""The methods of subscribers for one event, in their order."""


@dataclass(frozen=True, slots=True)
class Point:
    """An attribute of torch at which an event happens.

    Attributes:
        owner: The module or class; None where this torch has none.
        name: The attribute; None where this torch has none.
        event: The method of `Subscriber`.
        build: Makes the replacement, from the original and the subscribers' methods.
    """

    owner: Any
    name: str | None
    event: Callable[..., Any]
    build: Callable[[Any, Hears], Any]


def points() -> Iterator[Point]:
    """Yield every point of the modules that are imported."""
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    yield Point(Module, "__call__", Subscriber.around_module_call, _around)
    # By this `torch.fx` calls modules, torch.export too.
    traced = sys.modules.get("torch.fx._symbolic_trace")
    yield Point(traced, "_orig_module_call", Subscriber.around_module_call, _around)
    yield Point(Module, "state_dict", Subscriber.around_state_dict, _around)
    yield Point(Module, "load_state_dict", Subscriber.around_load_state_dict, _around)
    yield Point(torch.optim.swa_utils.AveragedModel, "__init__", Subscriber.average_made, _after)
    for owner, name in ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.export, "export")):
        yield Point(owner, name, Subscriber.around_export, _around)
    yield Point(torch.onnx, "export", Subscriber.around_export, _around)
    checkpoint, later = torch.utils.checkpoint, Subscriber.runs_later
    yield Point(checkpoint, torch_private.RECOMPUTATION, later, functools.partial(_later, place=0))
    yield Point(checkpoint.CheckpointFunction, "forward", later, functools.partial(_later, place=1))
    # The function `parallel_apply` hides the second and third of these modules as attributes.
    for name in ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply"):
        yield Point(sys.modules[name], "parallel_apply", later, _all_later)
    yield Point(autocast, "__enter__", Subscriber.autocast_entered, _after)
    yield Point(autocast, "__exit__", Subscriber.autocast_left, _before_exit)
    yield Point(torch.autograd, "backward", Subscriber.around_backward, _around)
    context = torch_private.CUSTOM_FUNCTION_CONTEXT
    yield Point(context, "__init__", Subscriber.function_called, _after)
    yield Point(context, "apply", Subscriber.around_function_backward, _around)
    yield Point(Tensor, "retain_grad", Subscriber.grad_retained, _after)
    yield Point(Tensor, "register_hook", Subscriber.hook_registered, _hook_of)
    accumulated = functools.partial(_hook_of, accumulated=True)
    yield Point(Tensor, "register_post_accumulate_grad_hook", Subscriber.hook_registered, accumulated)
    for name in ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        yield Point(Module, name, Subscriber.hook_registered, _hook_of)
    for name in ("register_module_full_backward_hook", "register_module_full_backward_pre_hook"):
        yield Point(torch.nn.modules.module, name, Subscriber.hook_registered, _hook_of_all)
    # The last two came with torch 2.6.
    pair = ("get_total_norm", "clip_grads_with_norm_") if hasattr(torch.nn.utils, "get_total_norm") else ()
    for name in ("clip_grad_norm_", "clip_grad_value_", *pair):
        yield Point(torch.nn.utils, name, Subscriber.clips_gradients, _before_clipping)
    yield Point(Optimizer, "__init__", Subscriber.optimizer_made, _after)
    yield Point(Optimizer, "__setstate__", Subscriber.optimizer_made, _after)
    yield Point(scaler, "__init__", Subscriber.scaler_made, _after)
    yield Point(scaler, "scale", Subscriber.loss_scaled, _after_scale)
    late = [sys.modules.get(name) for name in LATE_MODULES]
    sharded = getattr(late[0], "ShardedGradScaler", None)
    yield Point(sharded, "scale", Subscriber.loss_scaled, _after_scale)
    made = torch_private.STATE_MADE if hasattr(late[1], torch_private.STATE_MADE) else None
    yield Point(late[1], made, Subscriber.around_state_made, _around)
    yield Point(scaler, "unscale_", Subscriber.around_unscale, _around)
    yield Point(scaler, "step", Subscriber.around_scaler_step, _around)


# -- replacements --


def _around(original: Any, hears: Hears) -> Any:
    for around in reversed(hears):
        original = around(original)
    return original


def _after(original: Any, hears: Hears) -> Any:
    def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self_, *args, **kwargs)
        for hear in hears:
            hear(self_)
        return result

    return replacement


def _after_scale(original: Any, hears: Hears) -> Any:
    def scale(self_: Any, outputs: Any) -> Any:
        scaled = original(self_, outputs)
        for hear in hears:
            hear(self_, outputs)
        return scaled

    return scale


def _before_exit(original: Any, hears: Hears) -> Any:
    def leave(self_: Any, *exc_info: Any) -> Any:
        for hear in hears:
            hear(self_, exc_info[1])
        return original(self_, *exc_info)

    return leave


def _before_clipping(original: Any, hears: Hears) -> Any:
    first = next(iter(inspect.signature(original).parameters))

    def clip(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (args or first in kwargs):
            tensors = args[0] if args else kwargs.pop(first)
            # A generator can be gone through once.
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for hear in hears:
                hear(original.__name__.lstrip("_"), tensors)
            args = (tensors, *args[1:])
        return original(*args, **kwargs)

    return clip


def _later(original: Any, hears: Hears, *, place: int) -> Any:
    """Build the replacement of a function, or a staticmethod, that gets another one as its argument of this place."""
    if isinstance(original, staticmethod):
        return staticmethod(_later(original.__func__, hears, place=place))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:place], _each(hears, args[place]), *args[place + 1 :], **kwargs)

    return replacement


def _all_later(original: Any, hears: Hears) -> Any:
    def parallel_apply(modules: Sequence[Module], *args: Any, **kwargs: Any) -> Any:
        return original([_each(hears, module) for module in modules], *args, **kwargs)

    return parallel_apply


def _hook_of(original: Any, hears: Hears, *, accumulated: bool = False) -> Any:
    def register(self_: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = self_ if isinstance(self_, Tensor) else None
        return original(self_, _each(hears, hook, tensor, accumulated=accumulated), *args, **kwargs)

    return register


def _hook_of_all(original: Any, hears: Hears) -> Any:
    def register(hook: Any) -> Any:
        return original(_each(hears, hook, None, accumulated=False))

    return register


def _each(hears: Hears, function: Any, *args: Any, **kwargs: Any) -> Any:
    for hear in hears:
        function = hear(function, *args, **kwargs)
    return function


# -- steps --


class StepPatches:
    """The ``step`` of every class of torch's optimizers, replaced while a handle is active.

    Torch wraps the ``step`` of each class of optimizers to run hooks. The wrapper is replaced in the class. A wrapper
    that was bound before that, as by an LR scheduler, is met as well: the function that it calls is replaced in its
    closure.

    Args:
        hears: The methods ``around_step`` of subscribers, the first outermost.
        patches: Take the replacements.
    """

    def __init__(self, hears: Hears, patches: PatchSet) -> None:
        self._hears = hears
        self._patches = patches
        # The closure cells of torch's wrappers that were written to, with their contents before.
        self._cells: list[tuple[Any, Any]] = []
        for cls in _subclasses(Optimizer):
            self.reach(cls)

    def restore(self) -> None:
        """Restore what is not in the patches, and replace no more steps."""
        for cell, original in self._cells:
            cell.cell_contents = original
        self._cells = []

    def reach(self, cls: type) -> None:
        """Replace the steps of a class and of those that it derives from, as far as torch has put its hooks there."""
        replaced = {id(patch.parent) for patch in self._patches if patch.attribute == "step"}
        for base in cls.__mro__:
            step = vars(base).get("step")
            if getattr(step, "hooked", False) and id(base) not in replaced:
                original = original_of(step)
                self._patches.replace(base, "step", imitate(_around(original, self._hears), original))
                for cell in _cells_of_wrapped(original):
                    self._cells.append((cell, cell.cell_contents))
                    cell.cell_contents = _around(cell.cell_contents, self._hears)


def _cells_of_wrapped(step: Any) -> Iterator[Any]:
    """Yield the closure cell in which torch's wrapper of a step has the step itself, unless that is replaced."""
    while getattr(getattr(step, "__wrapped__", None), "hooked", False):
        # Somebody else's wrapper around torch's.
        step = step.__wrapped__
    for cell in getattr(step, "__closure__", None) or ():
        if cell.cell_contents is getattr(step, "__wrapped__", cell):
            yield cell


def _subclasses(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _subclasses(derived)
