"""Guarded optimizers: one guard each, the skips of all, ranks that agree, scalers of their own, and the release."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import autoamp
from autoamp.core import CastState, DynamicLossScaler, Guards, Listener, RequestedGroup, StaticLossScaler, runtime_of
from autoamp.core.optimizers import LossBlock
from autoamp.errors import UsageError


def guarded() -> Guards:
    casts = CastState(torch.float16, "cpu")
    casts.enable()
    return Guards(casts, (DynamicLossScaler(1024.0),))


@pytest.fixture
def optimizers() -> Guards:
    return guarded()


def sgd(*values: float) -> tuple[Parameter, torch.optim.SGD]:
    parameter = Parameter(torch.tensor(values or (1.0, 1.0)))
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def backward(optimizers: Guards, parameter: Tensor, optimizer: Any, factor: float = 1.0) -> None:
    loss = (parameter * factor).sum()
    with LossBlock(optimizers, loss, optimizer, optimizers.loss_scalers.choose(0), delay_unscale=False) as scaled:
        scaled.backward()


# -- guards --


@pytest.mark.parametrize(
    "wrong", [None, 3, {}, "sgd", iter(()), torch.nn.Linear(1, 1), type("Groups", (), {"step": 1})()]
)
def test_an_object_that_is_no_optimizer_is_refused_and_gets_no_guard(optimizers: Guards, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"Expected an optimizer, got .*, which has no param_groups and step\(\)"):
        optimizers.guard(wrong)
    assert optimizers.guards == []


class Delegating:
    """As accelerate and Fabric wrap an optimizer: all is handed to it, and not every call of ``step``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        if self.steps:
            self.optimizer.step()


@pytest.mark.parametrize("masters", [False, True])
def test_a_wrapper_that_hands_its_calls_on_has_the_guard_within(optimizers: Guards, masters: bool) -> None:
    half = Parameter(torch.ones(2, dtype=torch.float16 if masters else torch.float32))
    model = torch.nn.ParameterList([half])
    if masters:
        optimizers.models_with_masters.add(model)
    inner = torch.optim.SGD([half], lr=0.5)
    guard = optimizers.guard(inner)
    wrapper = Delegating(inner)
    assert optimizers.guard(wrapper) is guard
    # Two passes add up; the first overflows, and nothing of it is lost where the wrapper does not step.
    for last, factor in ((False, float("inf")), (True, 1.0)):
        backward(optimizers, half, wrapper, factor)
        wrapper.steps = last
        wrapper.step()
    assert optimizers.steps.skipped == 1
    assert half.tolist() == [1.0, 1.0]
    inner.zero_grad()
    backward(optimizers, half, wrapper)
    wrapper.step()
    assert half.tolist() == [0.5, 0.5]
    # One around an optimizer that nobody knows is guarded itself.
    assert optimizers.guard(Delegating(sgd()[1])) not in (None, guard)


class Unscalable(Tensor):
    """A loss that cannot be multiplied."""

    def float(self) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


def test_a_block_that_fails_to_begin_is_left(optimizers: Guards) -> None:
    parameter, optimizer = sgd()
    with (
        pytest.raises(ZeroDivisionError),
        LossBlock(optimizers, parameter.sum().as_subclass(Unscalable), optimizer, optimizers.scalers[0], False),
    ):
        pass
    backward(optimizers, parameter, optimizer)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]


# -- steps that no guard holds, or that go past it --


class Matmul(torch.optim.SGD):
    """Notes the dtype that its step and its closure compute in."""

    seen: list[torch.dtype]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen = [self.dtype()]
        if closure is not None:
            with torch.enable_grad():
                closure()
            self.seen.append(self.dtype())
        for group in self.param_groups:
            if group["lr"] > 1.0:
                raise ZeroDivisionError

    def dtype(self) -> torch.dtype:
        matrix = torch.ones(2, 2)
        return (matrix @ matrix).dtype

    def closure(self) -> None:
        self.seen.append(self.dtype())


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "looked up": lambda optimizer: lambda *args: optimizer.step(*args),
    "bound early": lambda optimizer: optimizer.step,
    "class": lambda optimizer: lambda *args: type(optimizer).step(optimizer, *args),
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9).optimizer.step,
}


@pytest.mark.parametrize("way", WAYS)
def test_casts_are_off_in_every_step_and_on_in_its_closure(way: str, half: torch.dtype) -> None:
    optimizer = Matmul([Parameter(torch.ones(1))], lr=0.5)
    step = WAYS[way](optimizer)
    handle = autoamp.init(device_type="cpu", dtype=half)
    step()
    assert optimizer.seen == [torch.float32]
    step(optimizer.closure)
    assert optimizer.seen == [torch.float32, half, torch.float32]
    assert optimizer.dtype() is half
    with handle.disable_casts():
        step(optimizer.closure)
        assert set(optimizer.seen) == {torch.float32}
    optimizer.param_groups[0]["lr"] = 2.0
    with pytest.raises(ZeroDivisionError):
        step()
    assert optimizer.dtype() is half
    handle.deactivate()
    with pytest.raises(ZeroDivisionError):
        step(optimizer.closure)
    assert set(optimizer.seen) == {torch.float32}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("delay", [False, True])
def test_no_way_to_a_step_goes_past_its_guard(way: str, factor: float, delay: bool) -> None:
    parameter, optimizer = sgd()
    step = WAYS[way](optimizer)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    with handle.scale_loss((parameter * factor).sum(), optimizer, delay_unscale=delay) as scaled:
        scaled.backward()
    step()
    assert handle.skipped_steps == (factor != 1.0)
    assert parameter.tolist() == ([0.5, 0.5] if factor == 1.0 else [1.0, 1.0])
    assert runtime_of(handle).optimizers.steps.guarded == 1
    assert handle.loss_scale == (2.0**16 if factor == 1.0 else 2.0**15)


@pytest.mark.parametrize("way", WAYS)
def test_steps_by_losses_that_nobody_scales_are_counted_apart(way: str) -> None:
    parameter, optimizer = sgd()
    step = WAYS[way](optimizer)
    counts = runtime_of(autoamp.init(device_type="cpu", dtype=torch.float16)).optimizers.steps
    for _ in range(2):
        parameter.grad = torch.ones(2)
        step()
    assert (parameter.tolist(), counts.plain, counts.guarded) == ([0.0, 0.0], 2, 0)
    # One that scales its loss itself counts its own.
    half = Parameter(torch.ones(2, dtype=torch.float16))
    own = autoamp.FP16_Optimizer(torch.optim.SGD([half], lr=0.5), static_loss_scale=8.0)
    own.backward(half.float().sum())
    own.step()
    assert (half.tolist(), counts.plain, counts.all) == ([0.5, 0.5], 2, 3)


def test_the_limit_of_skips_in_a_row_holds_for_an_optimizer_that_scales_its_loss_itself() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    half = Parameter(torch.ones(2, dtype=torch.float16))
    own = autoamp.FP16_Optimizer(torch.optim.SGD([half], lr=0.5), dynamic_loss_scale=True)
    handle.max_consecutive_skips = 2
    for raises in (False, True):
        own.backward(half.float().sum() * math.inf)
        with pytest.raises(autoamp.NonFiniteGradientsError, match="2 steps") if raises else contextlib.nullcontext():
            own.step()
        own.zero_grad()
    assert half.tolist() == [1.0, 1.0]


# -- ranks that agree --


@pytest.fixture
def agreeing(optimizers: Guards, fake_ranks: Callable[[int], None]) -> Guards:
    """Guarded optimizers of 2 ranks that agree on each step, of which the other one finds nothing."""
    fake_ranks(2)
    optimizers.sync_over(RequestedGroup.from_arguments(dist.group.WORLD, 1), None)
    return optimizers


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overflow", ["in the block", "after it"])
def test_ranks_agree_on_a_skip(agreeing: Guards, overflow: str, clips: bool) -> None:
    parameter, optimizer = sgd()
    for skips in (True, False):
        optimizer.zero_grad()
        backward(agreeing, parameter, optimizer, float("inf") if skips and overflow == "in the block" else 3.0)
        assert parameter.grad is not None
        if skips:
            parameter.grad[0] = float("inf")
        if clips:
            norm = agreeing.clip_grad_norm_(optimizer, 1.0, 2.0)
            assert float(norm) == (float("inf") if skips else pytest.approx(18.0**0.5))
        optimizer.step()
        assert agreeing.steps.last.skipped is skips
    moved = 0.5 * (0.5**0.5 if clips else 3.0)
    assert parameter.tolist() == pytest.approx([1.0 - moved] * 2, abs=1e-5)
    assert (agreeing.scalers[0].loss_scale, agreeing.scalers[0].unskipped) == (512.0, 1)


def other_rank(monkeypatch: pytest.MonkeyPatch, *vectors: list[float]) -> list[str]:
    """Let another rank give these vectors to the collectives, the last one to all that follow. Returns their ops.

    A vector is the power of the norm, whether there are checks, whether the loss is inf or nan, what gradients have
    now, and what the checks of the scaler found.
    """
    ops: list[str] = []

    def all_reduce(vector: Tensor, op: Any, group: Any = None) -> None:
        other = torch.tensor(vectors[min(len(ops), len(vectors) - 1)], dtype=vector.dtype)
        ops.append("max" if op == dist.ReduceOp.MAX else "sum")
        vector.copy_(torch.maximum(vector, other) if ops[-1] == "max" else vector + other)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return ops


@pytest.mark.parametrize(
    ("theirs", "skipped", "scale", "unskipped"),
    [
        ([0.0, 0.0, 0.0, 0.0, 0.0], False, 1024.0, 0), ([0.0, 1.0, 0.0, 0.0, 0.0], False, 1024.0, 1),
        ([0.0, 1.0, 0.0, 1.0, 1.0], True, 512.0, 0), ([0.0, 1.0, 0.0, 1.0, 0.0], True, 512.0, 0),
    ],
)  # fmt: skip
def test_a_rank_that_scaled_no_loss_goes_by_what_another_found(
    agreeing: Guards, monkeypatch: pytest.MonkeyPatch, theirs: list[float], skipped: bool, scale: float,
    unskipped: int,
) -> None:  # fmt: skip
    other_rank(monkeypatch, theirs)
    parameter, optimizer = sgd()
    agreeing.guard(optimizer)
    parameter.sum().backward()
    optimizer.step()
    assert agreeing.steps.last.skipped is skipped
    assert parameter.tolist() == ([1.0, 1.0] if skipped else [0.5, 0.5])
    assert (agreeing.scalers[0].loss_scale, agreeing.scalers[0].unskipped) == (scale, unskipped)


@pytest.mark.parametrize(("norm_type", "theirs", "norm"), [(2.0, 16.0, 5.0), (1.0, 4.0, 7.0), (math.inf, 4.0, 4.0)])
def test_ranks_clip_by_the_norm_of_all(
    agreeing: Guards, monkeypatch: pytest.MonkeyPatch, norm_type: float, theirs: float, norm: float
) -> None:
    ops = other_rank(monkeypatch, [theirs, 0.0, 0.0, 0.0, 0.0])
    parameter, optimizer = sgd(1.0)
    backward(agreeing, parameter, optimizer, 3.0)
    assert float(agreeing.clip_grad_norm_(optimizer, 1.0, norm_type)) == pytest.approx(norm)
    optimizer.step()
    assert parameter.item() == pytest.approx(1.0 - 0.5 * 3.0 / norm, rel=1e-5)
    # Any rank may have written to its gradients since, so they agree again.
    assert ops == ["max" if norm_type == math.inf else "sum", "sum"]


def test_ranks_without_a_loss_scale_exchange_nothing(agreeing: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = other_rank(monkeypatch, [0.0] * 5)
    agreeing.loss_scalers.use([StaticLossScaler(1.0)], [])
    agreeing.loss_scalers.forget_but(agreeing.loss_scalers.latest)
    parameter, optimizer = sgd()
    with LossBlock(agreeing, parameter.sum(), optimizer, agreeing.scalers[0], delay_unscale=False) as scaled:
        scaled.backward()
    optimizer.step()
    assert (parameter.tolist(), ops) == ([0.5, 0.5], [])


@pytest.mark.parametrize(("their_loss", "evaluations"), [(1.0, 1), (0.0, 33)])
def test_a_closure_is_not_repeated_where_the_loss_of_another_rank_is_inf(
    agreeing: Guards, monkeypatch: pytest.MonkeyPatch, their_loss: float, evaluations: int
) -> None:
    other_rank(monkeypatch, [0.0] * 5, [0.0, 1.0, their_loss, 1.0, 1.0])
    parameter, optimizer = sgd()
    scales: list[float] = []

    def closure() -> Tensor:
        scales.append(agreeing.scalers[0].loss_scale)
        backward(agreeing, parameter, optimizer)
        return parameter.sum()

    agreeing.guard(optimizer)
    optimizer.step(closure)
    assert scales == [1024.0 * 0.5**count for count in range(evaluations)]
    assert agreeing.steps.last.skipped
    assert parameter.tolist() == [1.0, 1.0]


def test_dropped_gradients_skip_the_next_step_where_ranks_agree(agreeing: Guards) -> None:
    """Another rank may have dropped none."""
    parameter, optimizer = sgd()
    backward(agreeing, parameter, optimizer, float("inf"))
    optimizer.zero_grad()
    backward(agreeing, parameter, optimizer)
    optimizer.step()
    assert agreeing.steps.last.skipped
    # A rank without gradients takes part in the agreement.
    other = agreeing.scalers[0]
    with LossBlock(agreeing, (parameter.detach() * 0).sum(), optimizer, other, delay_unscale=False):
        optimizer.zero_grad()
    optimizer.step()
    assert (agreeing.steps.skipped, other.unskipped) == (1, 1)


# -- scalers of wrapped optimizers --


def test_a_scale_loss_of_a_handle_that_is_not_active_is_refused() -> None:
    parameter, optimizer = sgd()
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    handle.wrap_optimizer(optimizer)
    scale_loss = optimizer.scale_loss  # type: ignore[attr-defined]
    handle.deactivate()
    with pytest.raises(UsageError, match="not active"):
        scale_loss(parameter.sum())


# -- beside other things --


def test_gradients_that_were_left_scaled_are_true_once_there_are_masters(optimizers: Guards) -> None:
    parameter = Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = optimizers.loss_scalers.choose(0)
    with LossBlock(optimizers, parameter.sum(), optimizer, scaler, delay_unscale=True) as scaled:
        scaled.backward()
    (master,) = (master for _, master in optimizers.keep_masters(optimizer).pairs)
    optimizer.step()
    assert (master.tolist(), parameter.tolist()) == ([0.5, 0.5], [0.5, 0.5])


# -- hooks of the program --

HOOKS: dict[str, Callable[[Any, Callable[..., None]], Any]] = {
    "before all": lambda _, call: register_optimizer_step_pre_hook(call),
    "after all": lambda _, call: register_optimizer_step_post_hook(call),
    "before its own": lambda optimizer, call: optimizer.register_step_pre_hook(call),
    "after its own": lambda optimizer, call: optimizer.register_step_post_hook(call),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_step_hooks_of_the_program_are_called(level: str, name: str) -> None:
    model = nn.Linear(2, 1)
    options: Any = {"opt_level": level, "loss_scale": 8.0, "device_type": "cpu", "verbosity": 0}
    model, optimizer = autoamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    called: list[Any] = []
    hook = HOOKS[name](optimizer, lambda optimizer, args, kwargs: called.append(optimizer))
    for _ in range(2):
        with autoamp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        hook.remove()
    assert called == [optimizer]
    autoamp.current_handle().deactivate()


def test_the_group_of_an_optimizer_precedes_that_of_all() -> None:
    every, own = (RequestedGroup(name, 1) for name in ("every", "own"))
    first, second = (torch.optim.SGD([torch.ones(1)], lr=1.0) for _ in range(2))
    asked = Guards(CastState(torch.float16, "cpu"), [])
    assert asked.requested_group(first) is None
    asked.sync_over(own, [first])
    assert (asked.requested_group(first), asked.requested_group(second)) == (own, None)
    asked.sync_over(every, None)
    assert (asked.requested_group(first), asked.requested_group(second)) == (own, every)


def test_a_compiled_step_is_that_of_torch() -> None:
    autoamp.init(device_type="cpu", dtype=torch.float16)
    parameter = Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(4)
    torch.compile(optimizer.step, backend="eager")()
    assert parameter.tolist() == [0.5] * 4


@pytest.mark.parametrize("kind", [list, iter, tuple])
def test_a_loss_that_is_inf_is_seen_in_whatever_holds_the_roots_of_a_pass(kind: Callable[[list[Any]], Any]) -> None:
    parameter, optimizer = sgd()
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="raise")
    loss = parameter.sum()
    torch.autograd.backward(kind([loss + loss.detach() * math.inf]))
    with pytest.raises(autoamp.NonFiniteGradientsError, match="inf or nan in the loss"):
        optimizer.step()
    handle.deactivate()


def test_a_block_that_is_dropped_before_its_end_leaves_true_gradients_and_free_optimizers() -> None:
    """A loop that calls the two methods itself, as callbacks do, and is left by an exception between them."""
    parameter, optimizer = sgd()
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=128.0)

    def batch(*, fails: bool) -> None:
        block = handle.scale_loss(parameter.sum(), optimizer)
        block.__enter__().backward()
        if fails:
            raise RuntimeError("the batch is lost")
        block.__exit__(None, None, None)

    with pytest.raises(RuntimeError, match="the batch is lost") as raised:
        batch(fails=True)
    del raised
    gc.collect()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]
    optimizer.zero_grad()
    batch(fails=False)
    optimizer.step()
    assert parameter.grad.tolist() == [1.0, 1.0]
    assert not handle.last_step_skipped
    handle.deactivate()


def test_steps_without_a_guard_count_once_they_were_taken() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="raise")
    parameter, optimizer = sgd()
    for value, steps in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        parameter.grad = torch.full((2,), value)
        with pytest.raises(autoamp.NonFiniteGradientsError) if value == math.inf else contextlib.nullcontext():
            optimizer.step()
        assert handle.stats["steps"] == steps
    handle.deactivate()


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad", "ignore:Using backward")
def test_gradients_with_a_graph_are_looked_at_without_one() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="raise")
    parameter, optimizer = sgd(1.0, 2.0)
    parameter.exp().sum().backward(create_graph=True)
    assert parameter.grad is not None
    assert parameter.grad.requires_grad
    optimizer.step()
    handle.deactivate()


def test_a_block_begins_once(optimizers: Guards) -> None:
    parameter, optimizer = sgd()
    block = LossBlock(optimizers, parameter.sum(), optimizer, optimizers.scalers[0], False)
    with block as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="begins once"):
        block.__enter__()


class Hears(Listener):
    """Keeps the numbers of steps whose cause is asked for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def step_nonfinite(self, number: int, *, late: bool) -> None:
        self.numbers.append(number)


@pytest.mark.filterwarnings("ignore:step . of SGD has inf or nan in the loss")
def test_the_cause_of_each_nan_loss_after_a_good_one_is_asked_for() -> None:
    handle, hears = autoamp.init(device_type="cpu", dtype=torch.float16), Hears()
    runtime_of(handle).optimizers.listeners.add(hears)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    try:
        for constant in (math.nan, 0.0, math.nan, math.nan, 0.0, math.nan):
            # The gradient is finite.
            with handle.scale_loss(param.sum() + constant, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        handle.deactivate()
    assert hears.numbers == [0, 2, 5]


def test_a_flag_of_the_programs_own_tells_of_a_step_that_a_block_has_checked() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.AdamW([param], lr=0.1, fused=True)
    try:
        with handle.scale_loss(param.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), None
        optimizer.step()
        assert handle.last_step_skipped
        assert torch.equal(param, torch.ones(2))
    finally:
        handle.deactivate()
