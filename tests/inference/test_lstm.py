"""LSTMs whose weights are promised to stay: packed once, with the very bits of any other call."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import autoamp
from tests.inference.pinned import HALF, Ops, check_pinned, check_same, packed_of, packs


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
