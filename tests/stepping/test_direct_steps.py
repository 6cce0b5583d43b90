"""Fused Adam and AdamW stepped by their operator alone: the bits of torch's steps, which the unusual is left to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from autoamp import kernels, torch_private
from autoamp.stepping import masters
from autoamp.stepping.direct_steps import step_directly
from tests.stepping.networks import backward, network, o2, snapshot

LR = 0.01


class Derived(AdamW):
    pass


def stepped(make: Callable[[Any], Any], shapes: tuple[tuple[int, ...], ...] = ((3, 4), (5,), (2, 1))) -> Any:
    """Return an optimizer that has stepped once, with gradients for the next step."""
    torch.manual_seed(0)
    optimizer = make([nn.Parameter(torch.randn(shape)) for shape in shapes])
    give_gradients(optimizer)
    optimizer.step()
    give_gradients(optimizer)
    return optimizer


def give_gradients(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.grad = torch.randn_like(param)


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def values(optimizer: Any) -> list[Tensor]:
    """Return the parameters and all state."""
    states = [value for param in params_of(optimizer) for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params_of(optimizer), *states)]


@pytest.fixture
def operated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each call of the operators took, from torch's steps or not."""
    calls: list[int] = []

    def watched(original: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        original(params, *args, **kwargs)

    for name in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, functools.partial(watched, getattr(torch, name)))
    return calls


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.3, "betas": (0.5, 0.6)}]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(AdamW, lr=LR, fused=True),
        functools.partial(AdamW, lr=LR, fused=True, maximize=True, eps=0.1),
        functools.partial(AdamW, lr=LR, fused=True, capturable=True),
        functools.partial(Adam, lr=LR, fused=True, weight_decay=0.1),
        functools.partial(Adam, lr=LR, fused=True, decoupled_weight_decay=True, weight_decay=0.1),
        lambda params: AdamW(groups(params), fused=True),
    ],
)
def test_steps_have_the_bits_of_torchs(make: Callable[[Any], Any], operated: list[int]) -> None:
    one, other = stepped(make), stepped(make)
    for _ in range(3):
        operated.clear()
        assert step_directly(one)
        assert sum(operated) == 3
        other.step()
        assert all(map(torch.equal, values(one), values(other)))
        for optimizer in (one, other):
            torch.manual_seed(1)
            give_gradients(optimizer)


def test_states_may_come_in_any_order(operated: list[int]) -> None:
    one, other = (stepped(functools.partial(AdamW, lr=LR, fused=True)) for _ in range(2))
    states = list(one.state.items())
    one.state.clear()
    one.state.update(reversed(states))
    operated.clear()
    assert step_directly(one)
    assert operated == [3]
    other.step()
    assert all(map(torch.equal, values(one), values(other)))


@pytest.mark.parametrize("overflows", [False, True])
def test_flags_of_overflows_are_heeded(overflows: bool) -> None:
    one, other = (stepped(functools.partial(AdamW, lr=LR, fused=True)) for _ in range(2))
    before = values(one)
    for optimizer in (one, other):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(overflows))
    assert step_directly(one)
    other.step()
    assert all(map(torch.equal, values(one), values(other)))
    assert all(map(torch.equal, values(one), before)) is overflows


def test_parameters_without_gradients_stay(operated: list[int]) -> None:
    optimizer = stepped(functools.partial(AdamW, lr=LR, fused=True))
    frozen = params_of(optimizer)[1]
    frozen.grad = None
    before, count = frozen.detach().clone(), optimizer.state[frozen]["step"].clone()
    operated.clear()
    assert step_directly(optimizer)
    assert operated == [2]
    assert torch.equal(frozen, before)
    assert torch.equal(optimizer.state[frozen]["step"], count)
    optimizer.zero_grad()
    assert step_directly(optimizer)
    assert operated == [2]


def no_state(optimizer: Any) -> None:
    optimizer.state.pop(params_of(optimizer)[-1])


def sparse_gradient(optimizer: Any) -> None:
    params_of(optimizer)[0].grad = torch.ones(3, 4).to_sparse()


def tensor_betas(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = torch.tensor(0.9), torch.tensor(0.99)


def double_parameter(optimizer: Any) -> None:
    param = params_of(optimizer)[0]
    param.grad = None
    param.data = param.data.double()
    param.grad = torch.ones_like(param)


def another_device(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    param = params_of(optimizer)[-1]
    param.grad = torch.ones_like(param)
    optimizer.state[param] = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.ones(2))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(AdamW, lr=LR),
        functools.partial(AdamW, lr=torch.tensor(LR), fused=True),
        functools.partial(AdamW, lr=LR, fused=True, amsgrad=True),
        functools.partial(Derived, lr=LR, fused=True),
        functools.partial(SGD, lr=LR, fused=True),
    ],
)
def test_others_are_left_to_torch(make: Callable[[Any], Any], operated: list[int]) -> None:
    optimizer = stepped(make)
    before = values(optimizer)
    operated.clear()
    assert not step_directly(optimizer)
    assert all(map(torch.equal, values(optimizer), before))
    assert not operated


@pytest.mark.parametrize("odd", [no_state, sparse_gradient, tensor_betas, double_parameter, another_device])
def test_what_is_unusual_is_left_to_torch(odd: Callable[[Any], None], operated: list[int]) -> None:
    optimizer = stepped(lambda params: AdamW(groups(params), fused=True))
    odd(optimizer)
    before = [param.detach().clone() for param in params_of(optimizer)[1:3]]
    operated.clear()
    assert not step_directly(optimizer)
    assert all(map(torch.equal, params_of(optimizer)[1:3], before))
    assert not operated


def test_all_is_torchs_where_the_operator_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = stepped(functools.partial(AdamW, lr=LR, fused=True))
    monkeypatch.setattr(torch_private, "FUSED_ADAMW", None)
    before = values(optimizer)
    assert not step_directly(optimizer)
    assert all(map(torch.equal, values(optimizer), before))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_masters_are_stepped_so(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def watched(optimizer: Any) -> bool:
        told.append(step_directly(optimizer))
        return told[-1]

    monkeypatch.setattr(masters, "step_directly", watched)
    monkeypatch.setattr(kernels, "opened", lambda _: None)

    def trained() -> list[Tensor]:
        model = network()
        optimizer = AdamW(model.parameters(), lr=LR, fused=True)
        o2(model, optimizer, loss_scale=scale)
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, optimizer, seed)
            optimizer.step()
        return snapshot(model, optimizer)

    directly = trained()
    # torch makes the state.
    assert told == [False, True, True, True]
    monkeypatch.setattr(torch_private, "FUSED_ADAMW", None)
    assert all(map(torch.equal, directly, trained()))
    assert not any(told[4:])
