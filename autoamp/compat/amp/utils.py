"""Small functions of `apex.amp.utils`, `.compat`, `.opt` and `.rnn_compat` that programs import."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.tensors import map_tensors

__all__ = [
    "OptimWrapper",
    "as_inplace",
    "casted_args",
    "collect_fp_tensor_types",
    "filter_attrs",
    "get_cuda_version",
    "has_func",
    "has_old_rnns",
    "is_cuda_enabled",
    "is_floating_point",
    "is_fp_tensor",
    "is_nested",
    "is_tensor",
    "iter_params",
    "maybe_float",
    "maybe_half",
    "scalar_python_val",
    "set_func",
    "tensor_is_float_tensor",
    "tensor_is_variable",
    "type_string",
    "verbosify",
]


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor."""
    return isinstance(value, Tensor)


def tensor_is_variable() -> bool:
    """Return True: tensors and variables are the same since torch 0.4."""
    return True


def tensor_is_float_tensor() -> bool:
    """Return False: ``torch.Tensor`` is the base class of all tensors, not another name of ``torch.FloatTensor``."""
    return False


def is_floating_point(value: Any) -> bool:
    """Tell whether a value is a floating tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_fp_tensor(value: Any) -> bool:
    """Tell whether a value is a floating tensor, or a tuple or list of nothing else."""
    return all(map(is_fp_tensor, value)) if is_nested(value) else is_floating_point(value)


def is_nested(value: Any) -> bool:
    """Tell whether a value is a tuple or a list."""
    return isinstance(value, (tuple, list))


def is_cuda_enabled() -> bool:
    """Tell whether this torch was built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that this torch was built with, as ``(12, 8)``; empty for a build without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def collect_fp_tensor_types(args: Any, kwargs: dict[str, Any]) -> list[str]:
    """Return the types of the floating tensors in nested arguments, sorted: ``["FloatTensor", "HalfTensor"]``."""
    found: set[str] = set()
    map_tensors((list(args), kwargs), lambda tensor: found.add(type_string(tensor)) if is_fp_tensor(tensor) else None)
    return sorted(found)


def as_inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes the result of ``function`` into its first argument, and returns that."""

    def inplace(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(function(x, *args, **kwargs))

    return inplace


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """Return ``cast_fn``, with its arguments ``name`` and ``verbose`` bound if ``verbose``."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def has_old_rnns() -> bool:
    """Return False: this torch has no recurrent layers from before torch 1.0."""
    return False


def type_string(value: Any) -> str:
    """Return the last part of a tensor's type: ``"HalfTensor"``."""
    return str(value.type()).rpartition(".")[2]


def maybe_half(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp16; the last two arguments have no effect."""
    return map_tensors(value, lambda tensor: tensor.half() if tensor.is_cuda and tensor.is_floating_point() else tensor)


def maybe_float(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a value with the floating CUDA tensors in it cast to fp32; the last two arguments have no effect."""
    return map_tensors(
        value, lambda tensor: tensor.float() if tensor.is_cuda and tensor.is_floating_point() else tensor
    )


def casted_args(cast_fn: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return ``args`` with the floating tensors cast, and cast those of ``kwargs`` in place, as Apex did."""
    for key, value in kwargs.items():
        kwargs[key] = cast_fn(value) if is_fp_tensor(value) else value
    return [cast_fn(value) if is_fp_tensor(value) else value for value in args]


def iter_params(param_groups: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
    """Yield every parameter of an optimizer's groups."""
    for group in param_groups:
        yield from group["params"]


def has_func(module: Any, name: str) -> bool:
    """Tell whether a module or class has an attribute, or a dict a key, of this name."""
    return name in module if isinstance(module, dict) else hasattr(module, name)


def set_func(module: Any, name: str, function: Any) -> None:
    """Set an attribute of a module or class, or a key of a dict."""
    if isinstance(module, dict):
        module[name] = function
    else:
        setattr(module, name, function)


def filter_attrs(module: Any, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that are attributes of a module."""
    return [name for name in names if hasattr(module, name)]


def scalar_python_val(value: Any) -> Any:
    """Return a one-element tensor as a Python number, and a number as it is."""
    return value.item() if hasattr(value, "item") else value


class OptimWrapper:
    """An optimizer with a ``scale_loss`` of its own, as ``handle.wrap_optimizer`` returned it in Apex.

    Args:
        optimizer: Any optimizer.
        amp_handle: The handle of ``amp.init``.
        num_loss: How many losses there are between two steps.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int = 1) -> None:
        self._optimizer = amp_handle.wrap_optimizer(optimizer, num_loss)

    def scale_loss(self, loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss for its backward pass; the first call of a step is the first loss, and so on."""
        return self._optimizer.scale_loss(loss)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer.

        Raises:
            UsageError: A closure is given. It might be evaluated any number of times, so which of its losses has which
                scaler is not known.
        """
        if closure is not None:
            raise UsageError("a wrapped optimizer takes no closure; use handle.scale_loss within the closure instead")
        return self._optimizer.step()
