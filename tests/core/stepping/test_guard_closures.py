"""``optimizer.step(closure)`` with a scaled loss in the closure: LBFGS, and all other optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core import DynamicLossScaler, LossScaler, StaticLossScaler
from autoamp.errors import NonFiniteGradientsError
from tests.core.stepping.guarded import guard_of, scale_loss

pytestmark = pytest.mark.filterwarnings("error")


class Curve:
    """A least-squares problem whose scaled gradients overflow above ``limit``, as they would in fp16."""

    def __init__(self, make: Callable[..., Any], scaler: LossScaler, **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(32, 4, generator=generator)
        self.targets = self.inputs @ torch.tensor([1.0, -2.0, 3.0, 0.5])
        self.param = Parameter(torch.zeros(4))
        self.optimizer = make([self.param], **kwargs)
        self.guard, self.scaler = guard_of(self.optimizer), scaler
        self.guard.owner().scalers.append(scaler)  # type: ignore[attr-defined]
        self.evaluations: list[float] = []
        self.limit = 65504.0

    def loss(self) -> Tensor:
        return (self.inputs @ self.param - self.targets).square().mean()

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        with scale_loss(loss, self.guard, self.scaler) as scaled:
            self.evaluations.append(self.scaler.loss_scale)
            scaled.backward()
            assert self.param.grad is not None
            # As a gradient in fp16 would have it.
            self.param.grad[self.param.grad.abs() > self.limit] = math.inf
        return loss


def test_a_later_evaluation_is_repeated_at_a_lower_scale() -> None:
    curve = Curve(torch.optim.LBFGS, DynamicLossScaler(2.0**10), lr=1.0)

    def closure() -> Tensor:
        later = len(curve.evaluations) > 1
        curve.limit = 0.0 if later and curve.scaler.loss_scale > 2.0**8 else 65504.0
        return curve.closure()

    curve.optimizer.step(closure)
    assert curve.evaluations[:6] == [2.0**10, 2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8]
    assert curve.loss().item() < 1e-3
    assert curve.guard.history.total == 0


@pytest.mark.parametrize("scaler", [StaticLossScaler(64.0), DynamicLossScaler(64.0, min_loss_scale=64.0)])
def test_a_first_evaluation_that_cannot_be_saved_is_a_skip(scaler: LossScaler) -> None:
    curve = Curve(torch.optim.LBFGS, scaler)
    curve.limit = 0.0
    loss = curve.optimizer.step(curve.closure)
    assert loss.item() == curve.loss().item()
    assert curve.param.tolist() == [0.0] * 4
    assert not curve.optimizer.state
    assert curve.evaluations == [64.0]
    assert (curve.guard.history.total, curve.guard.history.step.skipped) == (1, True)


@pytest.mark.parametrize(
    ("returned", "evaluations"),
    [
        (lambda loss: loss, 1),
        (lambda loss: loss.expand(2), 1),
        (lambda loss: loss.detach().item(), 1),
        (lambda loss: None, 33),
        (lambda loss: 1, 33),
    ],
)
def test_a_nan_loss_is_not_tried_again(returned: Callable[[Tensor], Any], evaluations: int) -> None:
    curve = Curve(torch.optim.SGD, DynamicLossScaler(64.0), lr=0.1)
    curve.inputs[0, 0] = math.nan
    curve.optimizer.step(lambda: returned(curve.closure()))
    assert curve.evaluations == [64.0 * 0.5**count for count in range(evaluations)]
    # As after any skip: no lower scale was of use.
    assert curve.scaler.loss_scale == 32.0
    assert curve.param.tolist() == [0.0] * 4
    assert curve.guard.history.total == 1


class Sharpness(torch.optim.SGD):
    """Climbs by the gradients that are there, then steps by those of the closure at that point, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        (param,) = self.param_groups[0]["params"]
        before = param.clone()
        param += param.grad
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        param.copy_(before - param.grad)
        return loss


@pytest.mark.parametrize("scaler", [DynamicLossScaler(64.0), StaticLossScaler(1.0)], ids=["dynamic", "one"])
def test_gradients_that_are_there_leave_the_closure_to_the_optimizer(scaler: LossScaler) -> None:
    param = Parameter(torch.ones(1))
    optimizer = Sharpness([param], lr=1.0)
    guard, calls = guard_of(optimizer), []

    def closure() -> Tensor:
        loss = param.square().sum()
        with scale_loss(loss, guard, scaler) as scaled:
            scaled.backward()
        calls.append(param.item())
        return loss

    closure()
    assert optimizer.step(closure).item() == 9.0
    assert calls == [1.0, 3.0]
    assert param.item() == 1.0 - 6.0


class Ahead(torch.optim.SGD):
    """Goes ahead by its momentum, and asks for the gradient there, as Nesterov wrote it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        (param,) = self.param_groups[0]["params"]
        velocity = self.state[param].setdefault("velocity", torch.ones_like(param))
        param += velocity
        with torch.enable_grad():
            loss = closure()
        param.sub_(param.grad)
        return loss


@pytest.mark.parametrize("overflows", ["never", "at high scales", "always"])
def test_a_closure_is_evaluated_where_the_optimizer_moved_to(overflows: str) -> None:
    param = Parameter(torch.ones(1))
    optimizer, scaler, calls = Ahead([param], lr=1.0), DynamicLossScaler(64.0), []
    guard = guard_of(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(param.item())
        loss = param.square().sum()
        is_fine = overflows == "never" or (overflows == "at high scales" and scaler.loss_scale < 32.0)
        with scale_loss(loss, guard, scaler) as scaled:
            (scaled * (1.0 if is_fine else math.inf)).backward()
        return loss

    if overflows == "always":
        with pytest.raises(NonFiniteGradientsError, match="intermediate point"):
            optimizer.step(closure)
        assert not guard.stepping
    else:
        assert optimizer.step(closure).item() == 4.0
        assert calls == [2.0] * (1 if overflows == "never" else 3)
        assert (param.item(), scaler.loss_scale) == (-2.0, 64.0 if overflows == "never" else 16.0)
        assert (guard.history.total, scaler.unskipped) == (0, 1)


def test_an_overflow_before_a_step_with_a_closure_skips_it() -> None:
    param = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    guard = guard_of(optimizer)
    with scale_loss(param.sum() * math.inf, guard, DynamicLossScaler()) as scaled:
        scaled.backward()
    assert optimizer.step(lambda: 1 / 0) is None
    assert guard.history.total == 1
