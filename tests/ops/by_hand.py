"""Calls of ops that are cast to half, compared with casts by hand, for the tests of several files here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

NAMES = [
    "__matmul__", "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm",
]  # fmt: skip
LISTS = {"extends": [], "fp16": NAMES}

Call = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
"""A call, and the shapes of its arguments."""


def check_by_hand(half: torch.dtype, case: Call, parameters: bool) -> None:
    """Check a call's value, and that its gradients are fp32 and have the values of casts by hand."""
    call, shapes = case
    inputs = _leaves(shapes, parameters)
    result = call(*inputs)
    by_hand = call(*(tensor.to(half) for tensor in inputs))
    assert result.dtype is by_hand.dtype is half
    assert torch.equal(result, by_hand)
    for one, other in zip(_gradients(result, inputs), _gradients(by_hand, inputs), strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other)


def check_mixtures(half: torch.dtype, case: Call) -> None:
    """Check a call's value where one of its arguments is half already, each in turn."""
    call, shapes = case
    inputs = _leaves(shapes, True)
    expected = call(*(tensor.to(half) for tensor in inputs))
    for place in range(len(inputs)):
        mixed = [tensor.to(half) if at == place else tensor for at, tensor in enumerate(inputs)]
        assert torch.equal(call(*mixed), expected)


def _leaves(shapes: list[tuple[int, ...]], parameters: bool) -> list[Tensor]:
    made = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return [made[0], *map(Parameter, made[1:])] if parameters else made


def _gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(result.float().square().sum(), inputs))
