"""Half gradients that wait for the step: what a program sees of them, and what steps make of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp import fp16_utils, kernels, optimizers
from autoamp.stepping import half_gradients, master_of
from autoamp.stepping.half_gradients import LeftHalf
from tests.stepping.networks import backward, equal, loss_of, masters, network, o2, snapshot

BF16 = torch.bfloat16


class WholeAdamW(torch.optim.AdamW):
    """Steps as AdamW does. It is no class of torch, so its gradients are widened at once."""


class WholeAdam(optimizers.FusedAdam):
    """The same for FusedAdam."""


def trained(make: Callable[..., Any], seed: int = 0) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model.parameters())
    o2(model, optimizer, dtype=BF16, loss_scale=None)
    backward(model, optimizer, seed)
    return model, optimizer


def waiting(optimizer: Any) -> list[bool]:
    return [type(master) is LeftHalf for master in masters(optimizer)]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is torch's way, of which kernels have steps of their own."""
    monkeypatch.setattr(kernels, "opened", lambda _: None)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_gradients, "_ON_CPU", 24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def test_a_gradient_waits_until_somebody_looks() -> None:
    model, optimizer = trained(adamw)
    halves = [p.grad for p in model.parameters()]
    assert all(waiting(optimizer))
    assert all(grad is not None and grad.dtype is BF16 for grad in halves)
    assert masters(optimizer)[1].grad.dtype is torch.float32
    # One look is one for all.
    assert not any(waiting(optimizer))
    for half, master, before in zip(model.parameters(), masters(optimizer), halves, strict=True):
        assert type(master) is Tensor
        assert half.grad is master.grad
        assert torch.equal(master.grad, before.float())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adamw, lambda params: WholeAdamW(params, lr=0.1, fused=True)),
        (
            lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
            lambda params: WholeAdamW(params, lr=0.1, foreach=True),
        ),
        (lambda params: optimizers.FusedAdam(params, lr=0.1), lambda params: WholeAdam(params, lr=0.1)),
    ],
    ids=["fused", "foreach", "FusedAdam"],
)
def test_steps_have_the_bits_of_a_step_by_wide_gradients(one: Any, other: Any) -> None:
    ends = []
    for make in (one, other):
        model, optimizer = trained(make)
        assert all(waiting(optimizer)) is (make is one)
        for seed in range(3):
            optimizer.step()
            optimizer.zero_grad()
            backward(model, optimizer, seed)
        # The last gradient adds to another.
        backward(model, optimizer, 4)
        optimizer.step()
        ends.append(snapshot(model, optimizer))
        assert all(torch.equal(p, master_of(p).to(BF16)) for p in model.parameters())  # type: ignore[union-attr]
    assert equal(*ends)


@pytest.mark.usefixtures("small_parts")
def test_a_step_by_parts_is_one_step() -> None:
    model, optimizer = trained(adamw)
    groups, params = optimizer.param_groups, optimizer.param_groups[0]["params"]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fused, parts = torch._fused_adamw_, []

    def watched(some: list[Tensor], *args: Any, **kwargs: Any) -> None:
        parts.append([param.numel() for param in some])
        fused(some, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", watched)
        optimizer.step()
    assert parts == [[32], [8, 16], [2]]
    assert calls == ["before", "after"]
    assert optimizer.param_groups is groups
    assert groups[0]["params"] is params
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    # The gradients are there after the step too.
    assert all(master.grad.dtype is torch.float32 for master in masters(optimizer))
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_add_up_in_fp32() -> None:
    model, optimizer = trained(adamw)
    first = [p.grad.float() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    second = [p.grad.float() for p in model.parameters()]
    for within_block in (True, False):
        optimizer.zero_grad()
        backward(model, optimizer, 0)
        if within_block:
            backward(model, optimizer, 1)
        else:
            loss_of(model, 1).backward()
        for master, one, other in zip(masters(optimizer), first, second, strict=True):
            assert torch.equal(master.grad, one + other)


def test_clearing_widens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(adamw)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *masters(optimizer)))
    backward(model, optimizer)
    model.zero_grad()
    monkeypatch.undo()
    assert all(master.grad is None for master in masters(optimizer))
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in (*model.parameters(), *masters(optimizer)))


def test_one_who_writes_to_a_master_that_waits() -> None:
    model, optimizer = trained(adamw)
    first, second, third, _ = masters(optimizer)
    before = first.detach().clone()
    first.grad = None
    second.grad = torch.full_like(second, 2.0)
    del third.grad
    optimizer.step()
    assert next(model.parameters()).grad is None
    assert third.grad is None
    assert torch.equal(first, before)
    assert torch.equal(list(model.parameters())[1].grad, torch.full_like(second, 2.0))  # type: ignore[arg-type]


def test_clipping_before_the_step() -> None:
    model, optimizer = trained(adamw)
    norm = torch.nn.utils.clip_grad_norm_(masters(optimizer), 0.01)
    assert norm.dtype is torch.float32
    optimizer.zero_grad()
    backward(model, optimizer)
    # Half gradients are clipped in half precision, and their masters' with them.
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert max(float(master.grad.abs().max()) for master in masters(optimizer)) <= 0.0101


def test_copies_and_pickles_are_plain() -> None:
    _, optimizer = trained(adamw)
    master = masters(optimizer)[0]
    twin = copy.deepcopy(master)
    assert type(twin) is Tensor
    assert torch.equal(twin.grad, master.grad)  # type: ignore[arg-type]
    _, optimizer = trained(adamw)
    again = pickle.loads(pickle.dumps(masters(optimizer)[0]))
    assert type(again) is Tensor
    assert torch.equal(again, masters(optimizer)[0])


@pytest.mark.usefixtures("small_parts")
def test_an_error_in_the_middle_leaves_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(adamw)
    groups, params = optimizer.param_groups, list(masters(optimizer))
    fused, calls = torch._fused_adamw_, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        fused(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert all(one is other for one, other in zip(masters(optimizer), params, strict=True))
    assert all(master.grad.dtype is torch.float32 for master in masters(optimizer))
    for half, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(half, master.to(BF16))


def test_the_optimizer_may_be_gone() -> None:
    _, optimizer = trained(adamw)
    kept = masters(optimizer)
    del optimizer
    assert all(master.grad is not None and master.grad.dtype is torch.float32 for master in kept)


def test_scaled_and_foreign_gradients_do_not_wait() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    o2(model, optimizer, dtype=BF16, loss_scale=8.0)
    backward(model, optimizer)
    assert not any(waiting(optimizer))
    _, optimizer = trained(lambda params: WholeAdamW(params, lr=0.1))
    assert not any(waiting(optimizer))


def test_fp16_optimizer_without_a_handle() -> None:
    model = network().to(BF16)
    optimizer = fp16_utils.FP16_Optimizer(adamw(model.parameters()))
    twin = network().to(BF16)
    other = fp16_utils.FP16_Optimizer(WholeAdamW(twin.parameters(), lr=0.1, fused=True))
    for seed in range(3):
        for net, stepped in ((model, optimizer), (twin, other)):
            stepped.zero_grad()
            stepped.backward(net(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(BF16)).sum())
            stepped.step()
    assert equal([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])
