"""Layers of a model whose weights are promised to stay: cast or packed once, with the results of any other call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn import Parameter

import autoamp
from tests.inference.pinned import HALF, Ops, by_hand, check_pinned, packed_of, packs


def holding(**parameters: Parameter) -> nn.Module:
    """Return a module with these parameters."""
    module = nn.Module()
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    return module


@packs
@pytest.mark.parametrize("shape", [(96,), (1, 96), (5, 96), (2, 3, 96), (0, 96), (3, 0, 96)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_packed_weights_give_what_plain_ones_give(handle: autoamp.Handle, shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(96, 64, bias=bias)
    for x in (torch.randn(shape), torch.randn(shape).to(HALF), torch.randn((*shape[:-1], 192))[..., ::2]):
        check_pinned(handle, layer, lambda x=x: layer(x))
        with torch.no_grad(), handle.inference(layer):
            layer(x)
            assert packed_of(handle, layer.weight) is not None
            # The packed weight stands in for the plain one, so that memory holds one of them.
            assert len(handle.cache) == 1 + bias
        assert len(handle.cache) == 0


def test_what_is_not_packed_is_cast_once(handle: autoamp.Handle) -> None:
    linear, convolution = nn.Linear(16, 16), nn.Conv2d(96, 96, 3, stride=2, padding="valid")
    for layer, x in ((linear, torch.randn(3, 16)), (convolution, torch.randn(2, 96, 6, 6))):
        check_pinned(handle, layer, lambda: layer(x), lambda: layer(x.to(HALF)), bits=True)  # noqa: B023
        with torch.no_grad(), handle.inference(layer):
            layer(x)
            assert packed_of(handle, layer.weight) is None
            assert len(handle.cache) == 2
    handle.deactivate()
    other, large = autoamp.init(device_type="cpu", dtype=torch.float16), nn.Linear(96, 64)
    with torch.no_grad(), other.inference(large):
        large(torch.randn(3, 96))
        assert packed_of(other, large.weight) is None


@packs
def test_one_weight_of_several_layers_and_ops(handle: autoamp.Handle) -> None:
    layer, other, x = nn.Linear(96, 64), nn.Linear(96, 64), torch.randn(5, 96)
    other.weight = layer.weight
    model = nn.ModuleList([layer, other])
    check_pinned(handle, model, lambda: layer(x), lambda: other(x), lambda: F.linear(x, layer.weight))
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    calls = [lambda: lstm(x), lambda: F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)]
    for order in (calls, calls[::-1]):
        check_pinned(handle, lstm, *order)


def test_a_bias_that_is_not_promised_as_long(handle: autoamp.Handle) -> None:
    layer, x, bias = nn.Linear(16, 16), torch.randn(3, 16), torch.randn(16)
    with torch.no_grad(), handle.inference(holding(weight=layer.weight)):
        with handle.inference(layer):
            layer(x)
        layer.bias.add_(1.0)
        assert torch.equal(layer(x), by_hand(x, layer))
        # One that is no parameter.
        for _ in range(2):
            expected = torch._C._nn.linear(x.to(HALF), layer.weight.to(HALF), bias.to(HALF))
            assert torch.equal(F.linear(x, layer.weight, bias), expected)
            bias.add_(1.0)


@packs
@pytest.mark.parametrize("shape", [(), (1,), (1, 64), (5, 64)], ids=str)
def test_a_bias_that_is_broadcast(handle: autoamp.Handle, shape: tuple[int, ...]) -> None:
    held, x = holding(weight=Parameter(torch.randn(64, 96)), bias=Parameter(torch.randn(shape))), torch.randn(5, 96)
    check_pinned(handle, held, lambda: F.linear(x, held.weight, held.bias), bits=True)


def test_casts_go_with_the_promise(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(96, 64), torch.randn(3, 96)
    for _ in range(2):
        with torch.no_grad(), handle.inference(layer):
            torch.testing.assert_close(layer(x), by_hand(x, layer))
            assert len(handle.cache) == 2
        assert len(handle.cache) == 0
        layer.weight.data.mul_(2.0)
        layer.bias.data.add_(1.0)


@packs
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_packed_weights_cannot_serve_is_computed_otherwise(handle: autoamp.Handle, mode: Any) -> None:
    layer, x, tangent = nn.Linear(96, 64), torch.randn(5, 96), torch.randn(5, 96)
    expected = by_hand(x, layer)
    close = {"rtol": 2e-2, "atol": 2e-2}
    with mode(), handle.inference(layer):
        layer(x)
        assert packed_of(handle, layer.weight) is not None
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected, **close)
        with Ops() as seen:
            torch.testing.assert_close(layer(x), expected)
        assert seen.names
        assert not any("mkldnn::" in name for name in seen.names)
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(layer(x), expected, **close)
        with autoamp.disable_casts():
            assert layer(x).dtype is torch.float32
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x95 and 96x64\)"):
            layer(x[:, 1:])
        nested = layer(torch.nested.nested_tensor([x[:2], x[2:]])).unbind()
        torch.testing.assert_close(torch.cat(nested), expected, **close)
    with torch.no_grad(), handle.inference(layer), forward_ad.dual_level():
        layer(x)
        result = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    assert result.tangent is not None
    torch.testing.assert_close(result.tangent.to(HALF), by_hand(tangent, layer) - layer.bias.to(HALF), **close)
