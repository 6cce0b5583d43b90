"""`amp_C`'s products, sums and norms of lists of tensors, its loss scale, and `MultiTensorApply`, which calls them.

The functions take ``(chunk_size, noop_flag, tensor_lists, ...)``. ``chunk_size`` has no effect: torch chooses one.
``noop_flag`` is a tensor of one element, which inf or nan sets to 1, without a wait for the device. A list may have
tensors of several floating dtypes. All is computed in fp32, or in fp64 for fp64 tensors. Of sums and products, tensors
of other dtypes are left as they are, such as the counts of batches in a state dict, whose bits Apex's kernels take for
floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.core import widened
from autoamp.errors import UsageError

TensorLists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write ``input * scale`` to the outputs. Inf and nan are written too.

    Args:
        chunk_size: No effect.
        noop_flag: One element, set to 1 where an output has inf or nan.
        tensor_lists: ``[inputs, outputs]``, which may be the same tensors.
        scale: The factor.

    Raises:
        UsageError: The lists do not fit. Nothing was written.
    """
    inputs, outputs = _floating(checked("multi_tensor_scale", tensor_lists, "inputs", "outputs"))
    if not inputs:
        return
    torch._foreach_copy_(outputs, torch._foreach_mul(widened(inputs), scale))
    _flag(noop_flag, outputs)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Write ``a * x + b * y`` to the outputs; ``tensor_lists`` is ``[x, y, outputs]``.

    Args:
        chunk_size: No effect.
        noop_flag: One element, set to 1 where ``arg_to_check`` finds inf or nan.
        tensor_lists: Three lists. The outputs may be tensors of ``x`` or ``y``.
        a: The factor of ``x``.
        b: The factor of ``y``.
        arg_to_check: Where to look for inf and nan: 0 in ``x``, 1 in ``y``, -1 in both.

    Raises:
        UsageError: The lists do not fit, or ``arg_to_check`` is another number. Nothing was written.
    """
    xs, ys, outputs = _floating(checked("multi_tensor_axpby", tensor_lists, "x", "y", "outputs"))
    if arg_to_check not in (-1, 0, 1):
        raise UsageError(f"multi_tensor_axpby: arg_to_check={arg_to_check!r}; choose 0 for x, 1 for y or -1 for both")
    if not outputs:
        return
    # Looked at first, since outputs may be the same tensors.
    _flag(noop_flag, {-1: [*xs, *ys], 0: xs, 1: ys}[arg_to_check])
    sums = torch._foreach_add(torch._foreach_mul(widened(xs), a), torch._foreach_mul(widened(ys), b))
    torch._foreach_copy_(outputs, sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all tensors taken as one vector, and that of each.

    Args:
        chunk_size: No effect.
        noop_flag: One element, set to 1 where the total is inf or nan.
        tensor_lists: ``[tensors]``.
        per_tensor: Whether the norm of each tensor is wanted.

    Returns:
        Two tensors, fp32, or fp64 where a tensor of the list is: the total, shape ``(1,)``, and the norm of each, shape
        ``(n,)``, or an empty tensor unless ``per_tensor``.

    Raises:
        UsageError: There is not exactly one list.
    """
    (tensors,) = checked("multi_tensor_l2norm", tensor_lists, "tensors")
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_empty(0, dtype=torch.float32)
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    each = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    total = torch.linalg.vector_norm(each).reshape(1)
    _raise_flag(noop_flag, ~torch.isfinite(total))
    return total, each if per_tensor else each.new_empty(0)


def checked(op: str, tensor_lists: TensorLists, *names: str) -> list[list[Tensor]]:
    """Return tensor lists as Python lists, once they are known to fit one another.

    Args:
        op: The name of the function, for the message.
        tensor_lists: What it was given.
        names: What each of its lists is.

    Raises:
        UsageError: The number of lists is not that of ``names``, or lengths or shapes differ between them.
    """
    lists = [list(tensors) for tensors in tensor_lists]
    wanted = f"{op} takes {len(names)} tensor lists, [{', '.join(names)}]"
    if len(lists) != len(names):
        raise UsageError(f"{wanted}; there are {len(lists)}")
    if len({len(tensors) for tensors in lists}) != 1:
        raise UsageError(f"{wanted}, of one length; theirs are {[len(tensors) for tensors in lists]}")
    for place, tensors in enumerate(zip(*lists, strict=True)):
        if len({tensor.shape for tensor in tensors}) != 1:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise UsageError(f"{wanted}, of the same shapes; those at place {place} are {shapes}")
    return lists


def _floating(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the lists without the places at which a tensor has no floating dtype."""
    kept = [place for place in zip(*lists, strict=True) if all(tensor.is_floating_point() for tensor in place)]
    return [[place[k] for place in kept] for k in range(len(lists))]


def _flag(noop_flag: Tensor, tensors: list[Tensor]) -> None:
    """Set the flag to 1 where a tensor has inf or nan."""
    # An empty tensor has no largest value.
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        largest = [norm.to(noop_flag.device, torch.float64) for norm in torch._foreach_norm(filled, float("inf"))]
        _raise_flag(noop_flag, ~torch.isfinite(torch.stack(largest)).all())


def _raise_flag(noop_flag: Tensor, bad: Tensor) -> None:
    """Set the flag to 1 where ``bad``, a bool of one element, is True."""
    noop_flag.masked_fill_(bad.to(noop_flag.device).reshape(()), 1)
