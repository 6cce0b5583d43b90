"""Weights that are promised to stay: cast or packed once, with the results of any other call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.core import runtime_of

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


@pytest.fixture
def handle() -> autoamp.Handle:
    lists = {"extends": [], "fp16": ["linear", "conv2d", "conv_transpose2d", "lstm"]}
    return autoamp.init(device_type="cpu", dtype=HALF, lists=lists)


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


# -- LSTMs: the very bits of any other call --


@packs
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("bidirectional", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("layers", [1, 3])
def test_results_are_the_same(
    handle: autoamp.Handle, layers: int, bidirectional: bool, batch_first: bool, mode: Any
) -> None:
    lstm = nn.LSTM(6, 8, layers, bidirectional=bidirectional, batch_first=batch_first)
    with mode():
        for shape in ((5, 3, 6), (1, 1, 6), (2, 7, 6)):
            x = torch.randn(shape)
            states = [torch.randn(layers * (1 + bidirectional), shape[not batch_first], 8) for _ in range(2)]
            for arguments in ((x,), (x, tuple(states)), (x.to(HALF), (states[0].to(HALF), states[1]))):
                expected = lstm(*arguments)
                with handle.inference(lstm):
                    for _ in range(2):
                        check_same(lstm(*arguments), expected, bits=True)
                    assert packed_of(handle, lstm.weight_ih_l0) is not None
                    assert len(handle.cache) == len(lstm._flat_weights)
                assert len(handle.cache) == 0


@packs
@pytest.mark.parametrize(
    "lstm",
    [
        nn.LSTM(6, 8, bias=False),
        nn.LSTM(6, 8, proj_size=3),
        nn.LSTM(6, 8, 2, dropout=0.5),
        nn.LSTM(6, 8).to(HALF),
        nn.LSTM(6, 8).double(),
    ],
    ids=str,
)
def test_what_is_not_packed_is_computed_otherwise(handle: autoamp.Handle, lstm: nn.LSTM) -> None:
    x = torch.randn(5, 3, 6, dtype=lstm.weight_ih_l0.dtype)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = lstm(x)
        with handle.inference(lstm):
            torch.manual_seed(1)
            check_same(lstm(x), expected, bits=True)
            assert packed_of(handle, lstm.weight_ih_l0) is None


@packs
def test_calls_of_other_kinds(handle: autoamp.Handle) -> None:
    lstm, x, state = nn.LSTM(6, 8), torch.randn(5, 3, 6), torch.zeros(1, 3, 8)
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    with torch.no_grad():
        expected, of_packed = lstm(x), lstm(packed)[0].data
        with handle.inference(lstm):
            lstm(x)
            assert packed_of(handle, lstm.weight_ih_l0) is not None
            assert torch.equal(lstm(packed)[0].data, of_packed)
            assert torch.equal(lstm(x[:, 0])[0], lstm(x)[0][:, 0])
            with Ops() as seen:
                check_same(lstm(x), expected, bits=True)
            assert seen.names
            assert "packed" not in seen.names
            with torch.backends.mkldnn.flags(enabled=False):
                check_same(lstm(x), expected)
            with autoamp.disable_casts():
                assert lstm(x)[0].dtype is torch.float32
            with torch.autocast("cpu", dtype=HALF):
                check_same(lstm(x), expected, bits=True)
            # Shapes that do not fit are for torch to refuse.
            for arguments, words in (
                ((x[..., 1:],), r"input\.size"),
                ((x, (state, state[..., 1:])), "hidden"),
                ((x, (state[:, 1:], state)), "hidden"),
                ((x[:0],), "Expected sequence length to be larger than 0"),
            ):
                for dtype in (torch.float32, HALF):
                    with pytest.raises(RuntimeError, match=words):
                        lstm(arguments[0].to(dtype), *arguments[1:])
            with torch.enable_grad():
                assert lstm(x)[0].requires_grad


@packs
def test_weights_that_two_share(handle: autoamp.Handle) -> None:
    one, other, x = nn.LSTM(6, 8), nn.LSTM(6, 8), torch.randn(5, 3, 6)
    other.weight_ih_l0 = one.weight_ih_l0
    check_pinned(handle, nn.ModuleList([one, other]), lambda: one(x), lambda: other(x), bits=True)


@packs
def test_weights_that_are_promised_in_part(handle: autoamp.Handle) -> None:
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    holder = nn.Module()
    holder.weight = lstm.weight_ih_l0
    with torch.no_grad(), handle.inference(holder):
        with handle.inference(lstm):
            lstm(x)
        lstm.bias_hh_l0.add_(1.0)
        found = lstm(x)
    with torch.no_grad():
        check_same(found, lstm(x), bits=True)


def test_fp16_is_not_packed() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"extends": [], "fp16": ["lstm"]})
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    with torch.no_grad(), handle.inference(lstm):
        with contextlib.suppress(RuntimeError):  # CPUs lack the kernel.
            lstm(x)
        assert packed_of(handle, lstm.weight_ih_l0) is None


@pytest.mark.parametrize("half", [torch.float16, HALF])
@pytest.mark.parametrize("count", [1, 2])
def test_attention_modules_of_torch_give_the_same_bits(half: torch.dtype, count: int) -> None:
    handle = autoamp.init(device_type="cpu", dtype=half)
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), count).eval()
    check_pinned(handle, model, lambda: model(torch.ones(1, 4, 16)), bits=half is torch.float16)
    handle.deactivate()
