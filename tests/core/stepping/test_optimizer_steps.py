"""Steps met whichever way they are called: a scheduler, a bound method or a subclass stands before torch's own step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import autoamp
from autoamp.core import runtime_of
from autoamp.errors import UsageError


class Counting(torch.optim.SGD):
    """Has a step of its own around that of torch, and a state that each step changes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return loss


MAKERS: dict[str, Callable[[Any], Any]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "own step": functools.partial(Counting, lr=0.5),
}
# When the optimizer and its schedulers are made: before init or after it.
MADE = ["b", "b b", "b a", "b bb", "b ba", "a", "a a"]
SCALED = ("scale_loss in the closure", "scale_loss", "auto_scale in the closure", "auto_scale", "none in the closure")


class Program:
    """Trains a parameter under autoamp or in plain torch.

    Args:
        maker: Of `MAKERS`.
        made: Of `MADE`.
        scaled: Of `SCALED`.
        bound: Whether the step is bound as soon as the optimizer is made.
    """

    def __init__(self, maker: str, made: str, scaled: str, bound: bool) -> None:
        self.maker, self.made, self.scaled, self.bound = maker, made, scaled, bound
        self.param = Parameter(torch.tensor([1.0, -2.0]))
        self.handle: Any = None
        self.schedulers: list[Any] = []

    def make(self, when: str) -> None:
        """Make what is to be made now."""
        optimizer, _, schedulers = self.made.partition(" ")
        if optimizer == when:
            self.optimizer = MAKERS[self.maker]([self.param])
            self.step = self.optimizer.step if self.bound else lambda *args: self.optimizer.step(*args)
        for kind, moment in zip((ExponentialLR, StepLR), schedulers, strict=False):
            if moment == when:
                self.schedulers.append(kind(self.optimizer, 0.5 if kind is ExponentialLR else 2))

    def loss(self, size: float) -> Tensor:
        """Evaluate the loss, with gradients."""
        loss = (self.param - size).square().sum()
        self.optimizer.zero_grad()
        if self.handle is not None and self.scaled.startswith("scale_loss"):
            with self.handle.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        return loss

    def run(self, sizes: list[float], *, plain: bool) -> tuple[Any, ...]:
        """Train, and return what came of it. In plain torch a step by an infinite loss is left out."""
        self.make("b")
        if not plain:
            self.handle = autoamp.init(device_type="cpu", dtype=torch.float16)
            if self.scaled.startswith("auto_scale"):
                self.handle.auto_scale()
        self.make("a")
        for size in sizes:
            if plain and math.isinf(size):
                pass
            elif "closure" in self.scaled:
                self.step(functools.partial(self.loss, size))
            else:
                self.loss(size)
                self.step()
            for scheduler in self.schedulers:
                scheduler.step()
        group = self.optimizer.param_groups[0]
        return self.param.tolist(), group["lr"], group.get("taken")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("bound", [False, True], ids=["looked up", "bound"])
@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_step_is_right_whenever_optimizer_and_schedulers_were_made(
    maker: str, made: str, scaled: str, bound: bool
) -> None:
    if maker == "LBFGS" and "closure" not in scaled:
        return
    # The first step overflows at every scale.
    sizes = [0.5, 0.25] if scaled.startswith("none") else [math.inf, 0.5, 0.25, math.inf, 0.125]
    program = Program(maker, made, scaled, bound)
    assert program.run(sizes, plain=False) == Program(maker, made, scaled, bound).run(sizes, plain=True)
    assert program.handle.skipped_steps == sum(map(math.isinf, sizes))


def test_a_first_loss_that_is_scaled_while_its_step_runs_is_refused_before_a_weight_moves() -> None:
    class OwnLoss(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            loss = param.sum() * math.inf
            with handle.scale_loss(loss, self) as scaled:
                scaled.backward()
            super().step()

    param = Parameter(torch.ones(2))
    optimizer = OwnLoss([param], lr=0.5)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    with pytest.raises(UsageError, match=r"The first scale_loss of OwnLoss came while its step\(\) runs; pass"):
        optimizer.step()
    assert param.tolist() == [1.0, 1.0]


KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Optimizer])
def test_a_step_that_was_bound_early_is_skipped_under_a_handle_and_is_torch_s_own_after_it(kind: type) -> None:
    param = Parameter(torch.ones(4, 4))
    optimizer: Any = kind([param])
    step, before = optimizer.step, kind.step  # type: ignore[attr-defined]
    for _ in range(2):
        handle = autoamp.init(device_type="cpu", dtype=torch.float16)
        with handle.scale_loss((param * math.inf).sum(), optimizer) as scaled:
            scaled.backward()
        step(*([lambda: None] if kind is torch.optim.LBFGS else []))
        assert handle.skipped_steps == 1
        assert bool((param == 1.0).all())
        handle.deactivate()
        assert kind.step is before  # type: ignore[attr-defined]
    # Once a program has compiled, Dynamo has a cell in the step of LBFGS too.
    assert before.__wrapped__ in [cell.cell_contents for cell in before.__closure__]


class Wrapper(Optimizer):
    """Steps another optimizer in its own step, as LARC does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__setstate__({})

    param_groups: Any = property(lambda self: self.inner.param_groups)
    state: Any = property(lambda self: self.inner.state)
    defaults: Any = property(lambda self: self.inner.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("scaled", ["no", "scale_loss", "auto_scale"])
def test_a_step_within_that_of_a_wrapper_counts_once(scaled: str) -> None:
    half = torch.bfloat16 if scaled == "no" else torch.float16
    handle = autoamp.init(device_type="cpu", dtype=half, loss_scale=autoamp.DynamicLossScaler(8.0))
    steps, written, followed = runtime_of(handle).optimizers.steps, [], []
    if scaled == "auto_scale":
        handle.auto_scale()
    param = Parameter(torch.ones(2))
    optimizer, other = Wrapper(torch.optim.SGD([param], lr=0.1)), torch.optim.SGD([Parameter(torch.ones(1))], lr=0.1)
    handle.follow(lambda: followed.append(steps.all))

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name.endswith("loss_scale"):
                written.append(step)

    handle.log_to(Writer(), 1)
    for step in range(4):
        optimizer.zero_grad()
        loss = (param * (math.inf if step == 1 and scaled != "no" else 1.0)).sum()
        with handle.scale_loss(loss, optimizer) if scaled == "scale_loss" else contextlib.nullcontext(loss) as given:
            given.backward()
        optimizer.step()
        assert steps.all == step + 1
    assert handle.skipped_steps == (scaled != "no")
    assert written == [1, 2, 3, 4]
    assert followed == ([1, 2, 3, 4] if scaled == "no" else [1, 3, 4])
    other.step()
    assert steps.all == 5
    handle.deactivate()


def test_another_optimizer_that_steps_within_a_closure_counts() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    param, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer, other = torch.optim.SGD([param], lr=0.1), torch.optim.SGD([second], lr=0.1)

    def closure() -> Tensor:
        loss = (param * second).sum()
        loss.backward()
        other.step()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert runtime_of(handle).optimizers.steps.all == 2
    handle.deactivate()


def test_the_gradients_of_a_step_within_that_of_a_wrapper_are_refused() -> None:
    class Second(Wrapper):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                (param * math.inf).sum().backward()
            return self.inner.step()

    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="skip")
    param = Parameter(torch.ones(2))
    optimizer = Second(torch.optim.SGD([param], lr=0.1))
    param.sum().backward()
    optimizer.step()
    assert param.tolist() == [1.0, 1.0]
    handle.deactivate()


def test_automatic_scaling_evaluates_no_closure_again_that_scaled_its_loss_before() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=autoamp.DynamicLossScaler(8.0))
    param, calls = Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([param], lr=0.1)
    with handle.scale_loss(param.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    handle.auto_scale()

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(1)
        loss = (param * (math.inf if len(calls) == 2 else 1.0)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert (len(calls), handle.skipped_steps) == (3, 1)
    handle.deactivate()
