"""Layers of a model whose weights are promised to stay: cast or packed once, with the results of any other call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

import autoamp
from autoamp.runtime import runtime_of
from tests.inference.pinned import HALF, by_hand, check_same, packed_of, packs

OPS: dict[str, Any] = {"extends": [], "fp16": ["linear", "conv2d", "conv_transpose2d", "lstm"]}


SHAPES = [(96,), (1, 96), (5, 96), (2, 3, 96), (0, 96), (3, 0, 96)]


@packs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_packed_weights_give_what_plain_ones_give(handle: autoamp.Handle, shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(96, 64, bias=bias)
    for x in (torch.randn(shape), torch.randn(shape).to(HALF), torch.randn((*shape[:-1], 192))[..., ::2]):
        expected = by_hand(x, layer)
        with torch.no_grad(), handle.inference(layer):
            found = [layer(x) for _ in range(2)]
            assert packed_of(handle, layer.weight) is not None
            # The packed weight stands in for the plain one, so that memory holds one of them.
            assert runtime_of(handle).casts.cache.pins[id(layer.weight)].kept is None
        for result in found:
            assert (result.dtype, result.stride()) == (HALF, expected.stride())
            torch.testing.assert_close(result, expected)


def test_small_weights_and_fp16_are_not_packed(handle: autoamp.Handle) -> None:
    small, x = nn.Linear(16, 16), torch.randn(3, 16)
    with torch.no_grad(), handle.inference(small):
        small(x)
        assert packed_of(handle, small.weight) is None
    handle.deactivate()
    other = autoamp.init(device_type="cpu", dtype=torch.float16)
    large = nn.Linear(96, 64)
    with torch.no_grad(), other.inference(large):
        large(torch.randn(3, 96))
        assert packed_of(other, large.weight) is None


def test_one_weight_with_several_biases(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(96, 64), torch.randn(5, 96)
    other = nn.Linear(96, 64)
    other.weight = layer.weight
    model = nn.ModuleList([layer, other])
    with torch.no_grad(), handle.inference(model):
        for _ in range(2):
            torch.testing.assert_close(layer(x), by_hand(x, layer))
            torch.testing.assert_close(other(x), by_hand(x, other))
            torch.testing.assert_close(F.linear(x, layer.weight), by_hand(x, layer) - layer.bias.to(HALF),
                                       rtol=2e-2, atol=2e-2)  # fmt: skip


def test_a_bias_that_is_promised_for_less_long(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(3, 16)
    holder = nn.Module()
    holder.weight = layer.weight
    with torch.no_grad(), handle.inference(holder):
        with handle.inference(layer):
            layer(x)
        layer.bias.add_(1.0)
        assert torch.equal(layer(x), by_hand(x, layer))


def test_a_bias_that_is_no_parameter(handle: autoamp.Handle) -> None:
    weight, bias, x = Parameter(torch.randn(16, 16)), torch.randn(16), torch.randn(3, 16)
    holder = nn.Module()
    holder.weight = weight
    with torch.no_grad(), handle.inference(holder):
        for _ in range(2):
            expected = torch._C._nn.linear(x.to(HALF), weight.to(HALF), bias.to(HALF))
            assert torch.equal(F.linear(x, weight, bias), expected)
            bias.add_(1.0)


@packs
@pytest.mark.parametrize("shape", [(), (1,), (1, 64), (5, 64)], ids=str)
def test_a_bias_that_is_broadcast(handle: autoamp.Handle, shape: tuple[int, ...]) -> None:
    holder = nn.Module()
    holder.weight, holder.bias = Parameter(torch.randn(64, 96)), Parameter(torch.randn(shape))
    x = torch.randn(5, 96)
    with torch.no_grad():
        expected = F.linear(x, holder.weight, holder.bias)
        with handle.inference(holder):
            for _ in range(2):
                assert torch.equal(F.linear(x, holder.weight, holder.bias), expected)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Conv2d], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 9, 8)),
    "without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 9, 8)),
    "strided and padded": (lambda: nn.Conv2d(8, 6, 3, stride=2, padding=1), (1, 8, 9, 8)),
    "of one pixel": (lambda: nn.Conv2d(8, 6, 1), (2, 8, 1, 1)),
    "of one channel": (lambda: nn.Conv2d(1, 1, 3), (2, 1, 5, 5)),
    "that leaves one pixel": (lambda: nn.Conv2d(8, 6, 5), (2, 8, 5, 5)),
    "with a large weight": (lambda: nn.Conv2d(96, 96, 3, padding=1), (1, 96, 6, 6)),
}


@packs
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_pinned_convolutions_give_what_plain_ones_give(handle: autoamp.Handle, name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    layer, x = make(), torch.randn(shape)
    large = torch.randn(shape[0], shape[1], 64, 80)
    with torch.no_grad():
        inputs = (x, x.to(HALF), x.flip(0), torch.randn(3, *shape[1:]), x[0], x.to(memory_format=torch.channels_last),
                  x.transpose(2, 3), large)  # fmt: skip
        expected = []
        for given in inputs:
            try:
                expected.append(layer(given))
            except RuntimeError as error:
                expected.append(error)
        with handle.inference(layer):
            for _ in range(2):
                for given, result in zip(inputs, expected, strict=True):
                    if isinstance(result, RuntimeError):
                        with pytest.raises(RuntimeError, match="Kernel size"):
                            layer(given)
                    else:
                        check_same(layer(given), result)


@packs
def test_one_weight_with_several_numbers(handle: autoamp.Handle) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 7, 7)
    strided = nn.Conv2d(4, 6, 3, stride=2, padding=1)
    strided.weight, strided.bias = layer.weight, layer.bias
    with torch.no_grad():
        expected = [layer(x), strided(x)]
        with handle.inference(layer):
            for _ in range(2):
                check_same(layer(x), expected[0])
                check_same(strided(x), expected[1])


@packs
def test_one_weight_with_several_ops(handle: autoamp.Handle) -> None:
    layer, x = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), torch.randn(2, 8, 8, 8)
    with torch.no_grad(), autoamp.region(device_type="cpu", dtype=HALF, lists=OPS):
        expected = layer(x)
        transposed = F.conv_transpose2d(expected, layer.weight, None, (2, 2), (1, 1), (1, 1), 1)
    with torch.no_grad(), autoamp.region(device_type="cpu", dtype=HALF, lists=OPS) as both, both.inference(layer):
        for _ in range(2):
            check_same(layer(x), expected)
            found = F.conv_transpose2d(expected, layer.weight, None, (2, 2), (1, 1), (1, 1), 1)
            check_same(found, transposed)


@packs
def test_a_weight_of_an_lstm_in_a_linear_layer() -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists=OPS)
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    with torch.no_grad():
        expected = lstm(x)[0], F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)
        with handle.inference(lstm):
            for _ in range(2):
                check_same(lstm(x)[0], expected[0])
                check_same(F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0), expected[1])
        with handle.inference(lstm):
            for _ in range(2):
                check_same(F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0), expected[1])
                check_same(lstm(x)[0], expected[0])


def test_casts_go_with_the_promise(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(96, 64), torch.randn(3, 96)
    for _ in range(2):
        with torch.no_grad(), handle.inference(layer):
            torch.testing.assert_close(layer(x), by_hand(x, layer))
            assert len(handle.cache) == 2
        assert len(handle.cache) == 0
        layer.weight.data.mul_(2.0)
        layer.bias.data.add_(1.0)
