"""Lists of tensors, checked before anything is launched and made to tables of pointers."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoamp_kernels.library import CHUNK, ArgumentError

__all__ = ["CODES", "Tables", "Tensors", "address", "names_of", "tables"]

Tensors = Sequence[Tensor]

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}
_HALF = (torch.float16, torch.bfloat16)
# What a list may be; states are fp32.
_DTYPES = {"params": (torch.float32, *_HALF), "grads": (torch.float32, *_HALF), "halves": _HALF}


@dataclass
class Tables:
    """Lists of a call, as the library takes them.

    Attributes:
        device: Where all tensors are.
        counts: Elements of each tensor.
        first_chunk: How many chunks the tensors before have; one more than ``counts``.
        pointers: By the names of lists, where the tensors of each lie.
    """

    device: torch.device
    counts: array[int]
    first_chunk: array[int]
    pointers: dict[str, array[int]]


def tables(kernel: str, lists: dict[str, Tensors]) -> Tables:
    """Check lists, of which all but the gradients are written, and return their tables.

    Args:
        kernel: The name of the kernel, for messages.
        lists: By their names. That of the parameters is first, and not empty.

    Raises:
        ArgumentError: A tensor that the kernel cannot take. The message names it, the rule and a remedy.
    """
    params = lists["params"]
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ArgumentError(
                f"{kernel}: {name} has {len(tensors)} tensors and params has {len(params)}; give one for each"
            )
        for index, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            problem = _problem(tensor, param, params[0].device, tensors[0].dtype, _DTYPES.get(name, (torch.float32,)))
            if problem:
                raise ArgumentError(f"{kernel}: {name}[{index}] {problem}")
    _check_apart(kernel, lists)
    counts = array("q", map(Tensor.numel, params))
    chunks = itertools.accumulate((-(-count // CHUNK) for count in counts), initial=0)
    pointers = {name: array("q", map(Tensor.data_ptr, tensors)) for name, tensors in lists.items()}
    return Tables(params[0].device, counts, array("q", chunks), pointers)


def _problem(
    tensor: Tensor, param: Tensor, device: torch.device, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]
) -> str | None:
    """Tell why a kernel cannot take a tensor beside its parameter; None where it can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return f"is a {type(tensor).__name__} of layout {tensor.layout}; give a dense torch.Tensor"
    if tensor.device != device:
        return f"is on {tensor.device} and params[0] on {device}; make a call for each device"
    if tensor.dtype not in allowed:
        return f"has dtype {tensor.dtype}; it must be {names_of(allowed)}"
    if tensor.dtype is not dtype:
        return f"has dtype {tensor.dtype} and the first one {dtype}; make a call for each dtype"
    if tensor.numel() != param.numel():
        return f"has {tensor.numel()} elements and its parameter {param.numel()}; give as many"
    if not (tensor.is_contiguous() and param.is_contiguous()) and not _in_order(tensor, param):
        return (
            f"is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}; its elements must lie without "
            "gaps, in the order of its parameter; give tensor.contiguous()"
        )
    return None


def _in_order(tensor: Tensor, param: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in the same order as those of its parameter."""
    if tensor.shape != param.shape:
        return False
    # Of a dimension of one element the stride says nothing.
    strides = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1]
    others = [pair for pair in zip(param.stride(), param.shape, strict=True) if pair[1] != 1]
    filled = 1
    for stride, size in sorted(strides):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return strides == others and filled == math.prod(tensor.shape)


def _check_apart(kernel: str, lists: dict[str, Tensors]) -> None:
    """Raise ArgumentError where a tensor that is written shares memory with another."""
    pieces = sorted(
        (begin, begin + tensor.numel() * tensor.element_size(), name, index)
        for name, tensors in lists.items()
        for index, tensor in enumerate(tensors)
        if (begin := tensor.data_ptr())
    )
    # Those of the pieces so far that reach furthest, of all and of the written ones.
    furthest = furthest_written = (0, 0, "", 0)
    for piece in pieces:
        is_written = piece[2] != "grads"
        other = furthest if is_written else furthest_written
        if piece[0] < other[1] and piece[0] < piece[1]:
            raise ArgumentError(
                f"{kernel}: {other[2]}[{other[3]}] and {piece[2]}[{piece[3]}] share memory; what the kernel writes "
                "must be shared with nothing; give each tensor once, or a clone"
            )
        furthest = max(furthest, piece, key=_end)
        furthest_written = max(furthest_written, piece, key=_end) if is_written else furthest_written


def _end(piece: tuple[int, int, str, int]) -> int:
    return piece[1]


def address(kernel: str, name: str, tensor: Tensor | None, device: torch.device, *dtypes: torch.dtype) -> int | None:
    """Return where a tensor of one element lies, None for none.

    Raises:
        ArgumentError: It has several elements, or is of another dtype or on another device than the kernel wants.
    """
    if tensor is None:
        return None
    if tensor.dtype not in dtypes or tensor.device != device or tensor.numel() != 1:
        raise ArgumentError(
            f"{kernel}: {name} has dtype {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}; it must be "
            f"one element of dtype {names_of(dtypes)} on {device}"
        )
    return tensor.data_ptr()


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return dtypes as a message has them."""
    return " or ".join(str(one).removeprefix("torch.") for one in dtypes)
