"""LSTMs whose weights are promised to stay: packed once, with the very bits of any other call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from tests.inference.pinned import HALF, packed_of, packs


@pytest.fixture
def handle() -> Iterator[autoamp.Handle]:
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists={"extends": [], "fp16": ["lstm"]})
    yield handle
    handle.deactivate()


def flat(result: Any) -> list[Tensor]:
    output, (h, c) = result
    return [output, h, c]


def check_same(found: Any, expected: Any) -> None:
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


@packs
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("bidirectional", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_results_are_the_same(
    handle: autoamp.Handle, layers: int, bidirectional: bool, batch_first: bool, mode: Any
) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 8, layers, bidirectional=bidirectional, batch_first=batch_first)
    with mode():
        for shape in ((5, 3, 6), (1, 1, 6), (2, 7, 6)):
            x = torch.randn(shape)
            states = [torch.randn(layers * (1 + bidirectional), shape[not batch_first], 8) for _ in range(2)]
            for arguments in ((x,), (x, tuple(states)), (x.to(HALF), (states[0].to(HALF), states[1]))):
                expected = lstm(*arguments)
                with handle.inference(lstm):
                    for _ in range(2):
                        check_same(lstm(*arguments), expected)
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
            check_same(lstm(x), expected)
            assert packed_of(handle, lstm.weight_ih_l0) is None


@packs
def test_calls_of_other_kinds(handle: autoamp.Handle) -> None:
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    seen: list[bool] = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(arg.is_mkldnn for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        expected = lstm(x)
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
        of_packed, _ = lstm(packed)
        with handle.inference(lstm):
            lstm(x)
            assert torch.equal(lstm(packed)[0].data, of_packed.data)
            assert torch.equal(lstm(x[:, 0])[0], lstm(x)[0][:, 0])
            with Looks():
                check_same(lstm(x), expected)
            assert seen
            assert not any(seen)
            with torch.backends.mkldnn.flags(enabled=False):
                torch.testing.assert_close(lstm(x)[0], expected[0], rtol=2e-2, atol=2e-2)
            with autoamp.disable_casts():
                assert lstm(x)[0].dtype is torch.float32
            with torch.autocast("cpu", dtype=HALF):
                check_same(lstm(x), expected)
            with pytest.raises(RuntimeError, match=r"input\.size"):
                lstm(x[..., 1:])
            with pytest.raises(RuntimeError, match="hidden"):
                lstm(x, (torch.zeros(2, 3, 8), torch.zeros(1, 3, 8)))
            with torch.enable_grad():
                assert lstm(x)[0].requires_grad


@packs
def test_shapes_that_do_not_fit_are_for_torch_to_refuse(handle: autoamp.Handle) -> None:
    lstm, x, state = nn.LSTM(6, 8), torch.randn(5, 3, 6).to(HALF), torch.zeros(1, 3, 8, dtype=HALF)
    with torch.no_grad(), handle.inference(lstm):
        lstm(x)
        assert packed_of(handle, lstm.weight_ih_l0) is not None
        for wrong in ((x[..., 1:], (state, state)), (x, (state[..., 1:], state)), (x, (state, state[:, 1:]))):
            with pytest.raises(RuntimeError, match=r"Expected|must"):
                lstm(*wrong)
        with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0"):
            lstm(x[:0])


@packs
def test_weights_that_two_share(handle: autoamp.Handle) -> None:
    one, other, x = nn.LSTM(6, 8), nn.LSTM(6, 8), torch.randn(5, 3, 6)
    other.weight_ih_l0 = one.weight_ih_l0
    model = nn.ModuleList([one, other])
    with torch.no_grad():
        expected = [lstm(x) for lstm in (one, other)]
        assert not torch.equal(expected[0][0], expected[1][0])
        with handle.inference(model):
            for _ in range(2):
                check_same(one(x), expected[0])
                check_same(other(x), expected[1])


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
        check_same(found, lstm(x))


def test_fp16_is_not_packed() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"extends": [], "fp16": ["lstm"]})
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    with torch.no_grad(), handle.inference(lstm):
        with contextlib.suppress(RuntimeError):  # CPUs lack the kernel.
            lstm(x)
        assert packed_of(handle, lstm.weight_ih_l0) is None
    handle.deactivate()
