"""What is packed for a weight, and how a result is compared, for the tests of several files here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def check_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
