"""Modules of torch whose ``forward`` hands their own attributes to one function: that function, called at once.

`torch.nn.Module.__getattr__` is Python, and a layer asks it for each of its tensors; that and the calls on the way cost
more than a small layer's casts. Here tensors are taken from the tables in which a module keeps them, and the same
function gets the same arguments. Whatever is out of the ordinary goes through ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Module, Parameter

from autoamp.patching import original_of

__all__ = ["DirectCall", "build_direct_calls", "hooks_of_all", "skips_call_impl"]

DirectCall = Callable[[Module, dict[str, Any], Tensor], Any]
"""Takes a module without hooks, its ``__dict__`` and its only argument; returns what its ``forward`` returns."""

# What `Module._call_impl` looks at before it calls ``forward`` and nothing else, and what the rest of it is made of.
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_REST = {"_global_forward_hooks_always_called", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"}
_MEAN, _VAR, _BATCHES = "running_mean", "running_var", "num_batches_tracked"
_ABSENT: Any = object()


def skips_call_impl() -> bool:
    """Tell whether `Module._call_impl` is as this room knows it: without hooks it only calls ``forward``."""
    names = set(getattr(getattr(Module._call_impl, "__code__", None), "co_names", ()))
    return {name for name in names - _REST if "hook" in name} == {*_HOOKS, *(f"_global{name}" for name in _HOOKS)}


def hooks_of_all() -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of the hooks that `Module._call_impl` calls for every module."""
    return [vars(torch.nn.modules.module)[f"_global{name}"] for name in _HOOKS]


def build_direct_calls(layers: Mapping[Any, Callable[..., Any]]) -> dict[type[Module], DirectCall]:
    """Build by class what does the work of ``forward``. Subclasses have none, since their ``forward`` may differ.

    Args:
        layers: Of some replacements in `torch.nn.functional`, what does the same for a tensor and parameters.
    """
    return {
        nn.Linear: _linear(layers),
        nn.Conv1d: _conv(nn.Conv1d, "conv1d", layers),
        nn.Conv2d: _conv(nn.Conv2d, "conv2d", layers),
        nn.Conv3d: _conv(nn.Conv3d, "conv3d", layers),
        nn.LayerNorm: _layer_norm(),
        nn.BatchNorm1d: _batch_norm(nn.BatchNorm1d, (2, 3)),
        nn.BatchNorm2d: _batch_norm(nn.BatchNorm2d, (4,)),
        nn.BatchNorm3d: _batch_norm(nn.BatchNorm3d, (5,)),
    }


def _linear(layers: Mapping[Any, Callable[..., Any]]) -> DirectCall:
    cls = nn.Linear
    forward = original_of(cls.forward)

    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters = own["_parameters"]
        if (
            cls.forward is not forward
            or "weight" not in parameters
            or "bias" not in parameters
            or "weight" in own
            or "bias" in own
        ):
            return self.forward(x)
        weight, bias = parameters["weight"], parameters["bias"]
        function = F.linear
        if function in layers and type(weight) is Parameter and (bias is None or type(bias) is Parameter):
            return layers[function](x, weight, bias)
        return function(x, weight, bias)

    return call


def _conv(cls: Any, name: str, layers: Mapping[Any, Callable[..., Any]]) -> DirectCall:
    forward, inner, functional = original_of(cls.forward), original_of(cls._conv_forward), vars(F)

    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters = own["_parameters"]
        if (
            cls.forward is not forward
            or cls._conv_forward is not inner
            or "weight" not in parameters
            or "bias" not in parameters
            or "weight" in own
            or "bias" in own
            or own["padding_mode"] != "zeros"
        ):
            return self.forward(x)
        weight, bias = parameters["weight"], parameters["bias"]
        function = functional[name]
        if function in layers and type(weight) is Parameter and (bias is None or type(bias) is Parameter):
            function = layers[function]
        return function(x, weight, bias, own["stride"], own["padding"], own["dilation"], own["groups"])

    return call


def _layer_norm() -> DirectCall:
    cls = nn.LayerNorm
    forward, functional = original_of(cls.forward), original_of(F.layer_norm)
    in_function_mode, cudnn = torch._C._is_torch_function_mode_enabled, torch._C._get_cudnn_enabled

    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters = own["_parameters"]
        if (
            cls.forward is not forward
            or "weight" not in parameters
            or "bias" not in parameters
            or "weight" in own
            or "bias" in own
        ):
            return self.forward(x)
        weight, bias = parameters["weight"], parameters["bias"]
        if (
            F.layer_norm is functional
            and not in_function_mode()
            and (weight is None or type(weight) is Parameter)
            and (bias is None or type(bias) is Parameter)
        ):
            # All that the function itself would do.
            return torch.layer_norm(x, own["normalized_shape"], weight, bias, own["eps"], cudnn())
        return F.layer_norm(x, own["normalized_shape"], weight, bias, own["eps"])

    return call


def _batch_norm(cls: Any, dims: tuple[int, ...]) -> DirectCall:
    forward, check, functional = original_of(cls.forward), original_of(cls._check_input_dim), original_of(F.batch_norm)
    in_function_mode, cudnn = torch._C._is_torch_function_mode_enabled, torch._C._get_cudnn_enabled
    tensors = (_MEAN, _VAR, _BATCHES, "weight", "bias")

    def call(self: Module, own: dict[str, Any], x: Tensor) -> Any:
        parameters, buffers = own["_parameters"], own["_buffers"]
        momentum, training = own["momentum"], own["training"]
        if (
            cls.forward is not forward
            or cls._check_input_dim is not check
            or not own["track_running_stats"]
            or momentum is None
            or x.dim() not in dims
            or not own.keys().isdisjoint(tensors)
        ):
            return self.forward(x)
        weight, bias = parameters.get("weight", _ABSENT), parameters.get("bias", _ABSENT)
        mean, var, batches = buffers.get(_MEAN), buffers.get(_VAR), buffers.get(_BATCHES)
        if (
            type(mean) is not Tensor
            or type(var) is not Tensor
            or type(batches) is not Tensor
            or not (weight is None or type(weight) is Parameter)
            or not (bias is None or type(bias) is Parameter)
        ):
            return self.forward(x)
        eps = own["eps"]
        if training:
            batches.add_(1)
        if (
            F.batch_norm is functional
            and not in_function_mode()
            # What the function would refuse is for it to refuse.
            and eps > 0.0
            and not (training and x.numel() <= x.size(1))
        ):
            return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn())
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)

    return call
