"""Recurrent layers on cuDNN: the flat copy of their weights, tried on the CPU with a layout that is made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

import autoamp
from autoamp.core import RECURRENT_LAYERS, CastState
from autoamp.core.special_calls import build_recurrent
from tests.core.casting.recurrent import LAYOUTS, MODELS, in_one_tensor, pretend_cudnn


def op_of(model: nn.RNNBase) -> Any:
    return {kind: op for op, kind in RECURRENT_LAYERS.items()}[model.mode]


def started(half: torch.dtype) -> CastState:
    casts = CastState(half, "cpu")
    casts.enable()
    return casts


class Spy:
    """A model's op with its replacement: the weights that the op gets in one tensor, and those of all other calls."""

    def __init__(
        self, model: nn.RNNBase, casts: CastState, monkeypatch: pytest.MonkeyPatch, takes: bool = True
    ) -> None:
        self.general: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []
        self.op = op_of(model)
        pretend_cudnn(monkeypatch, takes)
        run = build_recurrent(self, casts)

        def replacement(*args: Any) -> Any:
            result = run(args, {})
            return self(*casts.args_to_half(args)) if result is NotImplemented else result

        monkeypatch.setattr(torch.nn.modules.rnn._VF, self.op.__name__, replacement, raising=False)
        monkeypatch.setattr(nn.RNNBase, "check_input", lambda *_: None)

    def __call__(self, *args: Any) -> Any:
        weights = args[3] if isinstance(args[3], list) else args[2]
        (self.weights if in_one_tensor(weights) else self.general).append(weights)
        return self.op(*args)

    def __eq__(self, other: object) -> bool:
        # So that it is found among the recurrent layers.
        return other is self.op

    def __hash__(self) -> int:
        return hash(self.op)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_casts_one_by_one(
    half: torch.dtype, name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 3, 5)
    if packed:
        lengths = [4, 3, 1] if not model.batch_first else [3, 3, 2, 1]
        given: Any = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=model.batch_first)
    found = []
    for takes in (True, False):
        with monkeypatch.context() as patch:
            spy = Spy(model, casts := started(half), patch, takes)
            outputs, _ = model(given if packed else x)
        assert casts.dtype is half
        outputs = outputs.data if packed else outputs
        assert outputs.dtype == half
        assert bool(spy.weights) is takes
        assert bool(spy.general) is not takes
        assert all(map(in_one_tensor, spy.weights))
        layer = model.mode, model.num_layers, model.bidirectional, model.batch_first and not packed
        assert ([layer] if takes else []) == LAYOUTS[:1]
        outputs.float().square().sum().backward()
        found.append([outputs, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    assert {value.dtype for value in found[0][1:]} == {torch.float32}
    torch.testing.assert_close(found[0], found[1])


def test_casts_are_kept_from_the_second_use_on(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MODELS["GRU"](), torch.randn(4, 3, 5)
    spy = Spy(model, casts := started(half), monkeypatch)
    casts.thread.param_casts = {}
    for _ in range(3):
        model(x)
    first, second, third = spy.weights
    assert len(casts.cache) == len(first) == 8
    assert all(one is other for one, other in zip(second, third, strict=True))
    assert first[0] is not second[0]
    with torch.no_grad():
        model.weight_hh_l1.add_(1)
    model(x)
    fourth = spy.weights[-1]
    assert in_one_tensor(fourth)
    assert torch.equal(fourth[5], model.weight_hh_l1.to(half))
    with torch.no_grad():
        model(x)
    assert not spy.weights[-1][0].requires_grad
    assert not spy.general


def test_casts_of_weights_that_are_promised_to_stay_are_kept(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = MODELS["LSTM"](), torch.randn(4, 3, 5)
    model.weight_hh_l0.requires_grad_(False)
    spy = Spy(model, casts := started(half), monkeypatch)
    with casts.cache.pin(list(model.parameters())):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                model(x)
        first, second = spy.weights
        assert in_one_tensor(first)
        assert all(one is other for one, other in zip(first, second, strict=True))
        model(x)[0].sum().backward()
    assert model.weight_ih_l0.grad.isfinite().all()
    assert model.weight_ih_l0.grad.dtype == torch.float32
    assert model.weight_hh_l0.grad is None
    assert len(casts.cache) == 0


def test_weights_are_cast_one_by_one_where_there_is_nothing_to_lay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 5)
    model = MODELS["LSTM"]()
    spy = Spy(model, casts := started(torch.bfloat16), monkeypatch)
    # A mode has to see the op itself.
    with BaseTorchFunctionMode():
        model(x)
    assert len(spy.general) == 1
    with torch.autocast("cpu", torch.bfloat16, enabled=True):
        assert casts.autocast_rules()
        model.to(torch.bfloat16)(x.bfloat16())
    assert len(spy.general) == 2
    # Weights that are half already: there is nothing to lay out.
    model(x.bfloat16())
    assert len(spy.general) == 3
    assert not LAYOUTS


def test_a_compiler_traces_no_flat_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cudnn(monkeypatch)
    run = build_recurrent(torch.gru, started(torch.bfloat16))
    weights = list(nn.GRU(5, 6).parameters())

    def declined(x: Tensor) -> tuple[Tensor, bool]:
        args = x, torch.zeros(1, 3, 6), weights, True, 1, 0.0, False, False, False
        return x * 1, run(args, {}) is NotImplemented

    assert not declined(x := torch.randn(4, 3, 5))[1]
    assert torch.compile(declined, backend="eager", fullgraph=True)(x)[1]


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_casts_of_a_cell_s_weights_are_kept_at_once(half: torch.dtype, cell: Any) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.kept = cell(5, 6), []

        def forward(self, x: Tensor) -> Any:
            state = None
            for step in x:
                state = self.cell(step, state)
                self.kept.append(len(handle.cache))
            return state[0] if isinstance(state, tuple) else state

    handle = autoamp.init(device_type="cpu", dtype=half)
    loop = Loop()
    assert loop(torch.randn(3, 2, 5)).dtype == half
    assert loop.kept == [4, 4, 4]
