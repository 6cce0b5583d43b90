"""What a layer's pin has, and how a result is compared, for the tests of several files here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.inference.layers import PinnedConv2d, PinnedLayer
from autoamp.runtime import runtime_of

HALF = torch.bfloat16
packs = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN packs no bf16 weights on this CPU",
)


def layer_of(handle: autoamp.Handle, weight: Tensor) -> PinnedLayer:
    found = runtime_of(handle).casts.cache.pins[id(weight)].layer
    assert isinstance(found, PinnedLayer)
    return found


def packed_conv(handle: autoamp.Handle, layer: nn.Conv2d) -> PinnedConv2d:
    found = layer_of(handle, layer.weight)
    assert isinstance(found, PinnedConv2d)
    return found


def by_hand(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().to(HALF)
    return torch._C._nn.linear(x.to(HALF), layer.weight.detach().to(HALF), bias)


def check_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
