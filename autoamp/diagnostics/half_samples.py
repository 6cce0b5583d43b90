"""A few elements of half tensors, and of the parameters of an optimizer before a step, which fp32 then steps as well.

At most 2,047 elements of each tensor are looked at, as fp32 copies. Of a DTensor they are from the part of this rank.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.scaling import local_of
from autoamp.tensors import HALF_DTYPES

# Tensors of at most so many elements are looked at whole.
_FEW = 1024
# Their steps are those of each element by itself, so that a few elements step as they do among all.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


@dataclass
class Elements:
    """A few elements of a half parameter before a step, in fp32, with those of its gradient and of its state."""

    param: Tensor
    group: int
    values: Tensor
    grad: Any
    state: dict[str, Any]


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is of a half dtype, and this rank has elements of it."""
    return tensor.dtype in HALF_DTYPES and local_of(tensor).numel() > 0


def few(tensor: Tensor) -> Tensor:
    """Return elements at even distances, as an fp32 copy with one dimension."""
    flat = local_of(tensor.detach()).reshape(-1)
    # An odd distance, which does not stay in one column of a matrix.
    return flat[:: max(1, flat.numel() // _FEW) | 1].to(torch.float32, copy=True)


def few_of_grad(param: Tensor) -> Tensor | None:
    """Return such elements of the gradient of a parameter; None without one."""
    return None if param.grad is None or param.grad.layout is not torch.strided else few(param.grad)


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer has the step of one of torch's that step each element by itself."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, cls) and step is inspect.unwrap(cls.step) for cls in _ELEMENTWISE)


def sample_of(optimizer: Any, *, with_grads: bool) -> list[Elements]:
    """Return a few elements of each half parameter of an optimizer that is about to step.

    Args:
        optimizer: The optimizer.
        with_grads: Whether its gradients are there already.
    """
    return [
        Elements(param, number, few(param), few_of_grad(param) if with_grads else None, _state(optimizer, param))
        for number, group in enumerate(optimizer.param_groups)
        for param in filter(is_half, group["params"])
    ]


def lost_beside_fp32(optimizer: Any, number: int, elements: Sequence[Elements]) -> tuple[list[Tensor], str]:
    """Return the parameters of a group of which fp32 would have moved more than half of what did not move.

    And in words, the share of the elements of the group that did not move.
    """
    counts, lost = [], []
    for one, wide in zip(elements, _stepped_in_fp32(optimizer, number, elements), strict=True):
        has_grad, stays, stays_in_fp32 = one.grad != 0, few(one.param) == one.values, wide == one.values
        sets = (has_grad, has_grad & stays, has_grad & stays_in_fp32, has_grad & stays & ~stays_in_fp32)
        counts.append([int(each.sum()) for each in sets])
        if 2 * counts[-1][3] > counts[-1][0]:
            lost.append(one.param)
    total, unmoved, unmoved_in_fp32, _ = map(sum, zip(*counts, strict=True))
    elements_of = f"of the elements with a gradient in group {number}"
    return lost, f"{unmoved / total:.1%} {elements_of}, and in fp32 of {unmoved_in_fp32 / total:.1%}"


def are_unmoved(elements: Sequence[Elements], earlier: Sequence[Elements]) -> bool:
    """Whether no element of a group moved since an earlier sample, and nothing keeps what rounds away."""
    before = {id(one.param): one.values for one in earlier if one.grad is not None}
    stays = all(id(one.param) in before and torch.equal(before[id(one.param)], few(one.param)) for one in elements)
    return stays and not any(map(_keeps_low_bits, elements))


def _state(optimizer: Any, param: Tensor) -> dict[str, Any]:
    """Return copies of a parameter's optimizer state, in fp32 and of the same few elements."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return few(value) if value.shape == param.shape else value.detach().float().cpu().clone()

    return {name: copied(value) for name, value in optimizer.state.get(param, {}).items()}


def _keeps_low_bits(one: Elements) -> bool:
    """Whether the optimizer keeps what rounds away: in masters of its own, or as the compensation of Kahan's sums."""
    alike = [value for value in one.state.values() if isinstance(value, Tensor) and value.shape == one.values.shape]
    rounded = (value.to(one.param.dtype).float() for value in alike)
    return any("kahan" in name for name in one.state) or any(torch.equal(value, one.values) for value in rounded)


def _stepped_in_fp32(optimizer: Any, number: int, elements: Sequence[Elements]) -> list[Tensor]:
    """Return the elements after a step in fp32, by the optimizer's own code. Nothing of the optimizer is written to."""
    cls, options = type(optimizer), dict(optimizer.param_groups[number])
    # Not by its constructor, which programs and other libraries hook into.
    twin: Any = object.__new__(cls)
    params = [Parameter(one.values.clone()) for one in elements]
    for param, one in zip(params, elements, strict=True):
        param.grad = one.grad
    options.update({name: value.item() for name, value in options.items() if isinstance(value, Tensor)})
    options.update(params=params, fused=None, foreach=None, capturable=False, differentiable=False)
    twin.defaults, twin.param_groups = optimizer.defaults, [options]
    twin.state = collections.defaultdict(dict)
    twin.state.update((param, one.state) for param, one in zip(params, elements, strict=True) if one.state)
    inspect.unwrap(cls.step)(twin)
    return [param.detach() for param in params]
