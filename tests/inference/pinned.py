"""What is packed for a weight, and how results are compared, for the tests of several files here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.runtime import runtime_of

HALF = torch.bfloat16
packs = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN packs no bf16 weights on this CPU",
)


def packed_of(handle: autoamp.Handle, weight: Tensor) -> Any:
    """Return what is kept for a weight that is packed; None where it is not."""
    found = runtime_of(handle).casts.cache.pins[id(weight)].layer
    return found if found is not None and found.parameters else None


def by_hand(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().to(HALF)
    return torch._C._nn.linear(x.to(HALF), layer.weight.detach().to(HALF), bias)


def check_same(found: Any, expected: Any, *, bits: bool = False) -> None:
    """Check a tensor, or those in nested tuples: dtype, shape, strides and values, with ``bits`` to the bit."""
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            check_same(one, other, bits=bits)
        return
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    close = {"rtol": 0.0, "atol": 0.0} if bits else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **close)


def check_pinned(handle: autoamp.Handle, model: nn.Module, *calls: Callable[[], Any], bits: bool = False) -> None:
    """Check that each call gives, twice while the model's weights are promised to stay, what it gives without."""
    with torch.no_grad():
        expected = [call() for call in calls]
        with handle.inference(model):
            for call, result in [*zip(calls, expected, strict=True)] * 2:
                check_same(call(), result, bits=bits)


class Ops(TorchDispatchMode):
    """Notes the ops that are called, and whether one gets a packed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed = any(arg.is_mkldnn for arg in args if isinstance(arg, Tensor))
        self.names.append("packed" if packed else str(func))
        return func(*args, **(kwargs or {}))
