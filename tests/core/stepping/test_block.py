"""Blocks of a scaled loss: the scale of gradients, what is unscaled and checked, and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core import DynamicLossScaler, ScaledBlock, StaticLossScaler, StepGuard
from autoamp.errors import UsageError
from tests.core.stepping.guarded import Setup, guard_of, scale_loss

pytestmark = pytest.mark.filterwarnings("error")


# -- one block, one step --


def test_without_checks_there_is_no_pass(reads: list[int], passes: list[str]) -> None:
    setup = Setup()
    setup.scaler = StaticLossScaler(1.0)  # type: ignore[assignment]
    for _ in range(2):
        setup.backward()
        setup.optimizer.step()
    assert passes == []
    assert reads == []
    assert setup.param.tolist() == [1.0 - 0.5 - 1.0] * 2


# -- delay_unscale --


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_block_without_checks_finishes_what_was_delayed(factor: float) -> None:
    setup = Setup()
    setup.backward(factor, delay_unscale=True)
    with scale_loss(setup.param.sum(), setup.guard, StaticLossScaler(1.0)) as scaled:
        scaled.backward()
    setup.optimizer.step()
    assert setup.param.tolist() == ([0.0, 0.0] if factor == 1.0 else [1.0, 1.0])


# -- exceptions --


@pytest.mark.parametrize("factor", [2.0, math.inf])
@pytest.mark.parametrize("delay", [False, True])
def test_after_an_exception_gradients_hold_true_values(delay: bool, factor: float) -> None:
    setup = Setup()
    setup.backward(1.0)

    def interrupted() -> None:
        with scale_loss(setup.param.sum() * factor, setup.guard, setup.scaler, delay_unscale=delay) as scaled:
            scaled.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert setup.grad == [1.0 + factor] * 2
    assert (setup.guard.grads.scale, setup.guard.in_block) == (1.0, False)
    setup.optimizer.step()
    # The program may catch the exception and step: not with inf and nan.
    assert setup.param.tolist() == ([-0.5, -0.5] if factor == 2.0 else [1.0, 1.0])
    assert (setup.scaler.unskipped, setup.guard.history.step.skipped) == (int(factor == 2.0), factor != 2.0)


def test_after_an_exception_in_the_first_block_nothing_is_pending() -> None:
    setup = Setup()
    with pytest.raises(ZeroDivisionError), scale_loss(setup.param.sum(), setup.guard, setup.scaler):
        raise ZeroDivisionError
    setup.optimizer.step()
    assert setup.scaler.unskipped == 0
    setup.backward()
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]


# -- several optimizers --


class Pair:
    """Two optimizers, with a parameter of their own each and one in common."""

    def __init__(self) -> None:
        self.params = [Parameter(torch.ones(1)) for _ in range(3)]
        first, second, common = self.params
        self.optimizers = [torch.optim.SGD([first, common], lr=0.5), torch.optim.SGD([second, common], lr=0.5)]
        self.guards = [guard_of(optimizer) for optimizer in self.optimizers]
        self.scaler = DynamicLossScaler(1024.0)

    def backward(self, guards: Sequence[StepGuard], factors: Sequence[float], **kwargs: Any) -> None:
        loss = sum(param.sum() * factor for param, factor in zip(self.params, factors, strict=True))
        assert isinstance(loss, Tensor)
        with scale_loss(loss, guards, self.scaler, **kwargs) as scaled:
            scaled.backward()

    @property
    def grads(self) -> list[float]:
        return [param.grad.item() for param in self.params if param.grad is not None]


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 0)], ids=["once", "one of them twice"])
def test_a_block_of_two_optimizers_is_one_pass_and_one_update(order: tuple[int, ...], passes: list[str]) -> None:
    pair = Pair()
    guards = [pair.guards[place] for place in order]
    for count in (1.0, 2.0):
        pair.backward(guards, [1.0, 2.0, 3.0])
        assert pair.grads == [count, 2.0 * count, 3.0 * count]
        if count == 1.0:
            assert passes == ["unscale_"]
    for optimizer in pair.optimizers:
        optimizer.step()
    assert pair.scaler.unskipped == 1
    assert [guard.history.steps for guard in pair.guards] == [1, 1]


@pytest.mark.parametrize("scales", [(1024.0, 1024.0), (1024.0, 64.0), (64.0, 1024.0)])
def test_delayed_gradients_of_another_scaler_are_unscaled_once(scales: tuple[float, float]) -> None:
    pair = Pair()
    pair.scaler = DynamicLossScaler(scales[0])
    pair.backward(pair.guards, [1.0, 2.0, 3.0], delay_unscale=True)
    pair.scaler = DynamicLossScaler(scales[1])
    pair.backward(pair.guards, [1.0, 2.0, 3.0])
    assert pair.grads == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("delay", [False, True])
def test_a_parameter_in_common_changes_its_scale_once(delay: bool) -> None:
    pair = Pair()
    pair.backward(pair.guards[:1], [1.0, 0.0, 3.0], delay_unscale=delay)
    pair.params[1].grad = None
    pair.backward(pair.guards, [1.0, 2.0, 3.0])
    assert pair.grads == [2.0, 2.0, 6.0]


# -- no gradients --


def test_a_loss_of_other_parameters_warns() -> None:
    setup = Setup()
    with (
        pytest.warns(UserWarning, match=r"no parameter of SGD has a gradient.*scaled_loss\.backward") as caught,
        ScaledBlock([setup.guard], setup.scaler) as scale,
    ):
        (torch.ones(1, requires_grad=True) * scale).backward()
    assert caught[0].filename == __file__
    setup.optimizer.step()
    assert setup.scaler.unskipped == 0


def test_frozen_parameters_warn_with_the_cause() -> None:
    setup = Setup()
    setup.param.requires_grad_(False)
    setup.scaler = StaticLossScaler(1.0)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="frozen"), ScaledBlock([setup.guard], setup.scaler):
        pass


def test_one_of_two_without_gradients_is_named_and_not_skipped() -> None:
    setup, other = Setup(), Setup(torch.optim.Adam)
    with (
        pytest.warns(UserWarning, match="no parameter of Adam"),
        scale_loss(setup.param.sum() * math.inf, [setup.guard, other.guard], setup.scaler) as scaled,
    ):
        scaled.backward()
    setup.optimizer.step()
    other.optimizer.step()
    assert (setup.guard.history.total, other.guard.history.total) == (1, 0)


def test_a_delayed_block_may_leave_no_gradients() -> None:
    setup = Setup()
    with ScaledBlock([setup.guard], setup.scaler, delay_unscale=True):
        pass
    setup.optimizer.step()
    assert setup.scaler.unskipped == 0


def test_blocks_of_one_optimizer_do_not_nest() -> None:
    setup = Setup()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        scaled.backward()
        with pytest.raises(UsageError, match="SGD is in a scale_loss block"):
            setup.backward()
        assert setup.grad == [1024.0, 1024.0]
    assert setup.grad == [1.0, 1.0]
