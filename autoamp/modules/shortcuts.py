"""Modules of torch whose ``forward`` hands their own attributes to one function: that function, called at once.

`torch.nn.Module.__getattr__` is Python, and a layer asks it for each of its tensors; that and the calls on the way cost
more than a small layer's casts. Here tensors are taken from the tables in which a module keeps them, and the same
function gets the same arguments. Whatever is out of the ordinary goes through ``forward``.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Module, Parameter

from autoamp import torch_private
from autoamp.patching import SHORTCUT, original_of

__all__ = ["Shortcut", "Shortcuts", "build_shortcuts", "skips_call_impl"]

Shortcut = Callable[[Module, dict[str, Any], Tensor], Any]
"""Takes a module without hooks, its ``__dict__`` and its only argument; returns what its ``forward`` returns."""

# What `Module._call_impl` looks at before it calls ``forward`` and nothing else, and what the rest of it is made of.
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_REST = {"_global_forward_hooks_always_called", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"}
_MEAN, _VAR, _BATCHES = "running_mean", "running_var", "num_batches_tracked"
_Build = Callable[[Any, Callable[..., Any]], Shortcut]

# What is read from a module's own tables. An attribute of that name of the class, a property say, comes before those.
_READ = (
    "weight", "bias", _MEAN, _VAR, _BATCHES, "padding_mode", "stride", "padding", "dilation", "groups", "eps",
    "momentum", "normalized_shape", "training", "track_running_stats", "_parameters", "_buffers",
)  # fmt: skip


def skips_call_impl() -> bool:
    """Tell whether `Module._call_impl` is torch's, as this file knows it: without hooks it only calls ``forward``."""
    if torch_private.MODULE_CALL is None or _torchs(Module, "_call_impl") is None:
        return False
    names = set(torch_private.MODULE_CALL.__code__.co_names)
    return {name for name in names - _REST if "hook" in name} == {*_HOOKS, *(f"_global{name}" for name in _HOOKS)}


class Shortcuts:
    """Shortcuts by class: what does the work of ``forward``, as long as nobody replaces what it does without.

    Attributes:
        by_class: What `build_shortcuts` returns, by what that found at the last `refresh`.
    """

    def __init__(self) -> None:
        self._state = _state_of_classes()
        self._seen: list[Any] | None = None
        self.by_class: dict[type[Module], Shortcut] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look whether somebody has added an attribute to a class, or replaced what each call of a layer goes through.

        What else there is to replace, ``forward`` and the functions, a shortcut asks for itself.
        """
        now = self._state()
        if now != self._seen:
            # Another thread may be about to look one up, so that none is taken away.
            none = dict.fromkeys(self.by_class, _by_forward)
            self.by_class.update({**none, **build_shortcuts()})
            self._seen = now


def _state_of_classes() -> Callable[[], list[Any]]:
    """Return what tells, as cheaply as can be, how the classes of `_KINDS` and the names around them are now."""
    tables = [vars(base) for base in {base: None for cls in _KINDS for base in cls.__mro__ if base is not object}]
    members = vars(Module)
    linear, conv, layer_norm, batch_norm = (
        vars(sys.modules[cls.__module__]) for cls in (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d)
    )

    def state() -> list[Any]:
        return [
            *map(len, tables),
            members.get("__getattr__"), linear.get("F"), conv.get("F"), layer_norm.get("F"), batch_norm.get("F"),
        ]  # fmt: skip

    return state


def build_shortcuts() -> dict[type[Module], Shortcut]:
    """Build the shortcuts, by class: what does the work of ``forward``.

    Subclasses have none, since their ``forward`` may differ; nor has a class in which somebody replaced a method.
    """
    found: dict[type[Module], Shortcut] = {}
    getter = _torchs(Module, "__getattr__")
    for cls, (build, methods) in _KINDS.items():
        functions = [_torchs(cls, name) for name in ("forward", *methods)]
        if (
            getter is not None
            and getattr(cls, "__getattr__", None) is Module.__getattr__
            and cls.__getattribute__ is object.__getattribute__
            and not any(hasattr(cls, name) for name in _READ)
            and all(function is not None and function.__globals__.get("F", F) is F for function in functions)
        ):
            found[cls] = build(cls, functions[0])
    return found


def _by_forward(self: Module, own: dict[str, Any], x: Tensor) -> Any:
    return self.forward(x)


def _torchs(owner: Any, name: str) -> Any:
    """Return a function or method of torch, also where one of ours stands in for it; None if somebody replaced it."""
    found = original_of(getattr(owner, name))
    if type(found) is not types.FunctionType or found.__code__.co_name != name:
        return None
    homes = {owner.__name__} if isinstance(owner, types.ModuleType) else {base.__module__ for base in owner.__mro__}
    files = {getattr(sys.modules.get(home), "__file__", None) for home in homes}
    return found if found.__code__.co_filename in files else None


def _linear(cls: Any, forward: Any) -> Shortcut:
    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters = own["_parameters"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            return self.forward(x)
        if cls.forward is not forward or "weight" in own or "bias" in own:
            return self.forward(x)
        function = F.linear
        found = getattr(function, SHORTCUT, None)
        if (
            found is not None
            and found[0] is function
            and type(weight) is Parameter
            and (bias is None or type(bias) is Parameter)
        ):
            return found[1](x, weight, bias)
        return function(x, weight, bias)

    return call


def _conv(name: str) -> _Build:
    functional = vars(F)

    def build(cls: Any, forward: Any) -> Shortcut:
        inner = original_of(cls._conv_forward)

        def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
            parameters = own["_parameters"]
            try:
                padding_mode, stride, padding = own["padding_mode"], own["stride"], own["padding"]
                dilation, groups = own["dilation"], own["groups"]
                weight, bias = parameters["weight"], parameters["bias"]
            except KeyError:
                return self.forward(x)
            if (
                cls.forward is not forward
                or cls._conv_forward is not inner
                or "_conv_forward" in own
                or "weight" in own
                or "bias" in own
                or padding_mode != "zeros"
            ):
                return self.forward(x)
            function = functional[name]
            found = getattr(function, SHORTCUT, None)
            if (
                found is not None
                and found[0] is function
                and type(weight) is Parameter
                and (bias is None or type(bias) is Parameter)
            ):
                function = found[1]
            return function(x, weight, bias, stride, padding, dilation, groups)

        return call

    return build


def _layer_norm(cls: Any, forward: Any) -> Shortcut:
    functional = _torchs(F, "layer_norm")
    in_function_mode, cudnn = torch_private.in_function_mode, torch_private.cudnn_enabled

    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters = own["_parameters"]
        try:
            shape, eps = own["normalized_shape"], own["eps"]
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            return self.forward(x)
        if cls.forward is not forward or "weight" in own or "bias" in own:
            return self.forward(x)
        if (
            F.layer_norm is functional
            and not in_function_mode()
            and (weight is None or type(weight) is Parameter)
            and (bias is None or type(bias) is Parameter)
        ):
            # All that the function itself would do.
            return torch.layer_norm(x, shape, weight, bias, eps, cudnn())
        return F.layer_norm(x, shape, weight, bias, eps)

    return call


def _batch_norm(*dims: int) -> _Build:
    functional = _torchs(F, "batch_norm")
    in_function_mode, cudnn = torch_private.in_function_mode, torch_private.cudnn_enabled
    names = (_MEAN, _VAR, _BATCHES, "weight", "bias", "_check_input_dim")

    def build(cls: Any, forward: Any) -> Shortcut:
        check = original_of(cls._check_input_dim)

        def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
            parameters, buffers = own["_parameters"], own["_buffers"]
            try:
                momentum, training, eps, tracks = (
                    own["momentum"], own["training"], own["eps"], own["track_running_stats"],
                )  # fmt: skip
                mean, var, batches = buffers[_MEAN], buffers[_VAR], buffers[_BATCHES]
                weight, bias = parameters["weight"], parameters["bias"]
            except KeyError:
                return self.forward(x)
            if (
                cls.forward is not forward
                or cls._check_input_dim is not check
                or not tracks
                or momentum is None
                or type(training) is not bool
                or type(mean) is not Tensor
                or type(var) is not Tensor
                or type(batches) is not Tensor
                or not (weight is None or type(weight) is Parameter)
                or not (bias is None or type(bias) is Parameter)
                or not own.keys().isdisjoint(names)
                or x.dim() not in dims
            ):
                return self.forward(x)
            if training:
                batches.add_(1)
            if (
                F.batch_norm is functional
                and not in_function_mode()
                # For these the function raises an error.
                and eps > 0.0
                and not (training and x.numel() <= x.size(1))
            ):
                return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn())
            return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)

        return call

    return build


_KINDS: dict[type[Module], tuple[_Build, tuple[str, ...]]] = {
    nn.Linear: (_linear, ()),
    nn.Conv1d: (_conv("conv1d"), ("_conv_forward",)),
    nn.Conv2d: (_conv("conv2d"), ("_conv_forward",)),
    nn.Conv3d: (_conv("conv3d"), ("_conv_forward",)),
    nn.LayerNorm: (_layer_norm, ()),
    nn.BatchNorm1d: (_batch_norm(2, 3), ("_check_input_dim",)),
    nn.BatchNorm2d: (_batch_norm(4), ("_check_input_dim",)),
    nn.BatchNorm3d: (_batch_norm(5), ("_check_input_dim",)),
}
"""By class what builds its shortcut, and the methods that the shortcut does without beside ``forward``."""
