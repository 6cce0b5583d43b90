"""Recurrent networks against torch's own, with the same weights, and what a call leaves behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.apex.reparameterization.weight_norm import apply_weight_norm
from autoamp.apex.RNN import models as rnn
from autoamp.errors import UsageError

TIME, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
KINDS = ["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"]


def torchs(kind: str, **options: Any) -> nn.RNNBase:
    if kind in ("ReLU", "Tanh"):
        return nn.RNN(INPUT, HIDDEN, nonlinearity=kind.lower(), dtype=torch.float64, **options)
    return getattr(nn, kind)(INPUT, HIDDEN, dtype=torch.float64, **options)  # type: ignore[no-any-return]


def ours(kind: str, *args: Any, **options: Any) -> Any:
    return getattr(rnn, kind)(INPUT, HIDDEN, *args, **options)


def take_weights(target: Any, source: nn.RNNBase) -> None:
    """Copy the weights of torch's network to ours."""
    stacks = [("", target)] if isinstance(target, rnn.stackedRNN) else [("", target.fwd), ("_reverse", target.bckwrd)]
    names = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}
    for suffix, stack in stacks:
        for layer, cell in enumerate(stack.rnns):
            for theirs, mine in names.items():
                value = getattr(source, f"{theirs}_l{layer}{suffix}", None)
                assert (value is None) == (getattr(cell, mine) is None)
                if value is not None:
                    getattr(cell, mine).data = value.detach().clone()


def sequence(*shape: int) -> Tensor:
    return torch.randn(*(shape or (TIME, BATCH, INPUT)), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "ReLU", "Tanh"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_direction_is_torchs(kind: str, layers: int, bias: bool, batch_first: bool) -> None:
    theirs = torchs(kind, num_layers=layers, bias=bias, batch_first=batch_first)
    mine = ours(kind, layers, bias, batch_first).double()
    take_weights(mine, theirs)
    input = sequence()
    output, hidden = mine(input)
    expected, state = theirs(input)
    torch.testing.assert_close(output, expected)
    for one, other in zip(hidden, state if kind == "LSTM" else [state], strict=True):
        torch.testing.assert_close(one, other)
    grads = torch.autograd.grad(output.square().sum(), input)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), input))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "ReLU", "Tanh"])
def test_one_layer_in_both_directions_is_torchs(kind: str) -> None:
    theirs = torchs(kind, bidirectional=True)
    mine = ours(kind, 1, bidirectional=True).double()
    take_weights(mine, theirs)
    output, hidden = mine(sequence_ := sequence())
    expected, state = theirs(sequence_)
    torch.testing.assert_close(output, expected)
    for one, other in zip(hidden, state if kind == "LSTM" else [state], strict=True):
        torch.testing.assert_close(one[0], torch.cat(list(other), -1))


def mlstm_by_formula(cell: Any, input: Tensor) -> Tensor:
    """Krause et al. 2016, eq. 15 to 22, in the gates' order of apex: input, forget, cell, output."""
    h = c = torch.zeros(BATCH, HIDDEN, dtype=torch.float64)
    outputs = []
    for x in input:
        m = (x @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        gates = x @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh
        i, f, g, o = gates.split(HIDDEN, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def test_mlstm() -> None:
    mine = ours("mLSTM", 2).double()
    input = sequence()
    output, (h, c) = mine(input)
    first = mlstm_by_formula(mine.rnns[0], input)
    second = mlstm_by_formula(mine.rnns[1], first)
    torch.testing.assert_close(output, second)
    leaves = [input, *mine.parameters()]
    found, expected = (torch.autograd.grad(one.sin().sum(), leaves, retain_graph=True) for one in (output, second))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(h, torch.stack([first[-1], second[-1]]))
    assert c.shape == (2, BATCH, HIDDEN)


@pytest.mark.parametrize(("kind", "states"), [("LSTM", 2), ("mLSTM", 2), ("GRU", 1), ("ReLU", 1), ("Tanh", 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_all_hidden_states(kind: str, states: int, bidirectional: bool) -> None:
    mine = ours(kind, 2, bidirectional=bidirectional)
    input = torch.randn(TIME, BATCH, INPUT)
    output, hidden = mine(input, collect_hidden=True)
    assert [tuple(state.shape) for state in hidden] == [(TIME, 2, BATCH, HIDDEN * (1 + bidirectional))] * states
    torch.testing.assert_close(hidden[0][:, -1], output)
    mine.reset_hidden(BATCH)
    _, last = mine(input)
    for all_of_it, one in zip(hidden, last, strict=True):
        torch.testing.assert_close(all_of_it[-1, ..., :HIDDEN], one[..., :HIDDEN])
        # The way back ends at the first time step.
        torch.testing.assert_close(all_of_it[0, ..., HIDDEN:], one[..., HIDDEN:])


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_state_is_kept_until_reset(kind: str) -> None:
    mine = ours(kind, 2)
    first, second = torch.randn(2, BATCH, INPUT), torch.randn(3, BATCH, INPUT)
    whole, _ = mine(torch.cat([first, second]))
    mine.reset_hidden(BATCH)
    mine(first)
    mine.detach_hidden()
    rest, _ = mine(second)
    torch.testing.assert_close(rest, whole[2:])
    rest.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_of_both_directions(kind: str) -> None:
    mine = ours(kind, 2, bidirectional=True)
    input = torch.randn(TIME, BATCH, INPUT)
    expected, _ = mine(input)
    mine.detach_hidden()
    assert not torch.equal(mine(input)[0], expected)
    mine.reset_hidden(BATCH)
    torch.testing.assert_close(mine(input)[0], expected)


def test_history_reaches_back_until_detached() -> None:
    mine = ours("Tanh", 1)
    input = torch.randn(2, BATCH, INPUT, requires_grad=True)
    mine(input)
    reaching, _ = mine(torch.randn(2, BATCH, INPUT))
    assert torch.autograd.grad(reaching.sum(), input)[0].abs().sum() > 0
    mine.detach_hidden()
    output, _ = mine(torch.randn(2, BATCH, INPUT))
    assert torch.autograd.grad(output.sum(), input, allow_unused=True) == (None,)


def test_another_batch_size_begins_from_zeros() -> None:
    mine = ours("GRU", 1)
    input = torch.randn(TIME, BATCH, INPUT)
    expected, _ = mine(input)
    mine(torch.randn(TIME, BATCH + 1, INPUT))
    torch.testing.assert_close(mine(input)[0], expected)
    mine.init_hidden(BATCH)
    assert not torch.equal(mine(input)[0], expected), "init_hidden keeps a state of that batch size"


@pytest.mark.parametrize("bidirectional", [False, True])
def test_detach_before_a_state(bidirectional: bool) -> None:
    with pytest.raises(UsageError, match="reset_hidden"):
        ours("LSTM", 1, bidirectional=bidirectional).detach_hidden()


def test_dropout_is_between_layers_and_in_training_alone() -> None:
    input = torch.randn(TIME, BATCH, INPUT)
    one = ours("Tanh", 1, dropout=1.0)
    expected, _ = one(input)
    assert expected.abs().sum() > 0
    two = ours("Tanh", 2, False, False, 1.0)
    assert not two(input)[0].any()
    two.eval()
    two.reset_hidden(BATCH)
    assert two(input)[0].all()


def test_state_dict_has_the_names_of_apex() -> None:
    assert list(ours("LSTM", 1).state_dict()) == ["rnns.0.w_ih", "rnns.0.w_hh", "rnns.0.b_ih", "rnns.0.b_hh"]
    assert list(ours("GRU", 2, bias=False).state_dict()) == [
        f"rnns.{place}.{w}" for place in (0, 1) for w in ("w_ih", "w_hh")
    ]
    assert {"rnns.0.w_mih", "rnns.0.w_mhh"} < set(ours("mLSTM", 1).state_dict())
    assert all(name.startswith(("fwd.", "bckwrd.")) for name in ours("ReLU", 1, bidirectional=True).state_dict())


@pytest.mark.parametrize("bidirectional", [False, True])
def test_parameters_are_drawn_anew(bidirectional: bool) -> None:
    mine = ours("mLSTM", 2, bidirectional=bidirectional)
    for parameter in mine.parameters():
        nn.init.constant_(parameter, 9.0)
    mine.reset_parameters()
    assert all(0 < float(parameter.detach().abs().max()) <= HIDDEN**-0.5 for parameter in mine.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_after_a_call(copied: Any) -> None:
    mine = ours("LSTM", 2)
    input = torch.randn(TIME, BATCH, INPUT)
    expected, _ = mine(input)
    torch.testing.assert_close(copied(mine)(input)[0], expected)


@pytest.mark.parametrize("shape", [(BATCH, INPUT), (0, BATCH, INPUT), (TIME, 0, INPUT)])
def test_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="must be"):
        ours("LSTM", 1)(torch.randn(*shape))


def test_an_output_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="output_size=2"):
        ours("LSTM", 1, output_size=2)
    ours("LSTM", 1, output_size=HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_under_casts(kind: str, half: torch.dtype) -> None:
    mine = ours(kind, 2)
    input = torch.randn(TIME, BATCH, INPUT)
    expected, _ = mine(input)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    mine.reset_hidden(BATCH)
    autoamp.init(dtype=half, device_type="cpu")
    for _ in range(2):
        mine.reset_hidden(BATCH)
        output, hidden = mine(input)
        assert output.dtype is half
        torch.testing.assert_close(output.float(), expected, rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(hidden[0][-1].float(), expected[-1], rtol=5e-2, atol=5e-2)
        output.float().square().sum().backward()
    for parameter in mine.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert torch.isfinite(parameter.grad).all()
    torch.testing.assert_close(mine.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_cast_with_a_hidden_state(kind: str, half: torch.dtype) -> None:
    mine = ours(kind, 2)
    mine.reset_hidden(BATCH)
    expected, _ = mine(torch.ones(TIME, BATCH, INPUT))
    mine.reset_hidden(BATCH)
    output, _ = mine.to(half)(torch.ones(TIME, BATCH, INPUT, dtype=half))
    assert output.dtype is half
    torch.testing.assert_close(output.float(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_trains_under_levels(level: str, half: torch.dtype) -> None:
    mine = apply_weight_norm(ours("mLSTM", 2))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    mine, optimizer = autoamp.initialize(
        mine, optimizer, opt_level=level, dtype=half, device_type="cpu", loss_scale=8.0
    )
    input, losses = torch.randn(TIME, BATCH, INPUT), []
    mine.reset_hidden(BATCH)
    for _ in range(8):
        mine.detach_hidden()
        loss = (mine(input)[0].float() - 0.3).square().mean()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
