"""What the step of a guarded optimizer does after blocks of a scaled loss."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Linear, Parameter

from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.scaling import DynamicLossScaler, StaticLossScaler
from autoamp.stepping import MasterWeights
from tests.stepping.guarded import Setup, guard_of, scale_loss

pytestmark = pytest.mark.filterwarnings("error")


# -- one block, one step --


OPTIMIZERS: list[Callable[..., Any]] = [
    lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    torch.optim.Adam,
    lambda params, lr: torch.optim.AdamW(params, lr, foreach=False),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "adamw"])
def test_a_skip_leaves_everything_as_it_was(optimizer: Callable[..., Any]) -> None:
    setup = Setup(optimizer)
    hooks, skips = list[str](), setup.guard.skips
    setup.optimizer.register_step_pre_hook(lambda *_: hooks.append("after a skip" if skips.step.skipped else "pre"))
    setup.optimizer.register_step_post_hook(lambda *_: hooks.append("post"))
    setup.backward()
    setup.optimizer.step()
    weights, state = setup.param.detach().clone(), copy.deepcopy(setup.optimizer.state_dict())
    hooks.clear()
    setup.backward(math.inf)
    assert setup.optimizer.step() is None
    assert torch.equal(setup.param, weights)
    after = setup.optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    for index, entry in state["state"].items():
        for name, value in entry.items():
            assert torch.equal(after["state"][index][name], value)
    assert hooks == []
    assert (skips.steps, skips.total, skips.in_a_row, skips.step.skipped) == (2, 1, 1, True)
    assert (setup.scaler.loss_scale, setup.scaler.unskipped) == (512.0, 0)
    setup.optimizer.zero_grad()
    setup.backward()
    setup.optimizer.step()
    assert hooks == ["pre", "post"]
    assert not torch.equal(setup.param, weights)
    assert (skips.steps, skips.total, skips.in_a_row, skips.step.skipped) == (3, 1, 0, False)


def test_halves_that_overflow_by_the_scale_alone_train_on() -> None:
    setup = Setup(dtype=torch.float16)
    setup.scaler = DynamicLossScaler(2.0**20)
    for _ in range(5):
        setup.optimizer.zero_grad()
        setup.backward(0.125)
        setup.optimizer.step()
    # 0.125 * 2**20 and * 2**19 are beyond fp16, 0.125 * 2**18 is 32768.
    assert setup.guard.skips.total == 2
    assert setup.scaler.loss_scale == 2.0**18
    assert setup.param.tolist() == [1.0 - 3 * 0.0625] * 2


def test_overflowed_tells_of_a_skip_before_the_step(reads: list[int]) -> None:
    setup = Setup()
    assert not setup.guard.overflowed()
    setup.backward()
    assert not setup.guard.overflowed()
    setup.backward(math.inf)
    assert setup.guard.overflowed()
    assert (setup.scaler.loss_scale, setup.scaler.unskipped) == (1024.0, 0)
    setup.optimizer.step()
    assert reads == [1, 1]
    assert setup.guard.overflowed()
    assert setup.scaler.loss_scale == 512.0


def test_a_step_of_several_blocks_is_one_reading(reads: list[int], passes: list[str]) -> None:
    setup = Setup()
    for _ in range(2):
        for count in range(3):
            setup.backward(0.25)
            assert passes.count("unscale_") == count + 1
        assert reads == []
        setup.optimizer.step()
        assert len(reads) == 1
        reads.clear()
        passes.clear()
        setup.optimizer.zero_grad(set_to_none=False)
    assert setup.param.tolist() == [1.0 - 2 * 0.375] * 2
    assert setup.scaler.unskipped == 2


def test_a_step_without_a_block_passes_through(reads: list[int]) -> None:
    setup = Setup()
    setup.param.grad = torch.full((2,), math.inf)
    setup.optimizer.step()
    assert setup.param.tolist() == [-math.inf, -math.inf]
    assert reads == []


def test_a_step_inside_the_block_is_refused() -> None:
    setup = Setup()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        scaled.backward()
        with pytest.raises(UsageError, match=r"1024; move optimizer\.step\(\) after the with block"):
            setup.optimizer.step()
    assert setup.guard.skips.steps == 0
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]


# -- several blocks a step. More of them, at random: tests/property --


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("scaler", [DynamicLossScaler, StaticLossScaler])
def test_an_overflow_in_any_block_of_a_step_skips_it(bad: int, scaler: Any) -> None:
    setup = Setup()
    setup.scaler = scaler(1024.0)
    for index in range(3):
        setup.backward(math.nan if index == bad else 1.0)
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert setup.scaler.loss_scale == (512.0 if scaler is DynamicLossScaler else 1024.0)
    assert (setup.scaler.unskipped, setup.scaler.overflows, setup.guard.skips.total) == (0, 1, 1)


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_dropped_gradients_update_the_scaler_and_skip_no_step(factor: float) -> None:
    setup = Setup()
    setup.backward(factor)
    setup.optimizer.zero_grad()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        # The scaler was updated before the block began.
        assert scaled.item() == (2048.0 if factor == 1.0 else 1024.0)
        scaled.backward()
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]
    assert setup.guard.skips.total == 0
    assert setup.scaler.unskipped == (2 if factor == 1.0 else 1)


CLIPS: list[Callable[[Setup], Any]] = [
    lambda setup: torch.nn.utils.clip_grad_value_([setup.param], 1.0),
    lambda setup: setattr(setup.param, "grad", torch.clamp(setup.param.grad, -1.0, 1.0)),  # type: ignore[arg-type]
    lambda setup: setup.param.grad.nan_to_num_(posinf=1.0),  # type: ignore[union-attr]
]


@pytest.mark.parametrize("clip", CLIPS, ids=["in place", "replaced", "nan_to_num"])
@pytest.mark.parametrize("factor", [0.5, math.inf])
def test_clipping_between_micro_batches_hides_no_overflow(clip: Callable[[Setup], Any], factor: float) -> None:
    setup = Setup()
    setup.backward(factor)
    clip(setup)
    setup.backward(0.5)
    setup.optimizer.step()
    assert setup.param.tolist() == ([0.5, 0.5] if factor == 0.5 else [1.0, 1.0])
    assert setup.guard.skips.total == (factor != 0.5)
    assert setup.scaler.loss_scale == (1024.0 if factor == 0.5 else 512.0)


# -- delay_unscale --


def test_delayed_gradients_that_were_dropped_leave_no_scale() -> None:
    setup = Setup()
    setup.backward(1.0, delay_unscale=True)
    setup.optimizer.zero_grad()
    setup.optimizer.step()
    assert setup.guard.grads.scale == 1.0
    setup.backward(1.0, delay_unscale=True)
    setup.param.grad = None
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        assert setup.guard.grads.scale == 1024.0
        scaled.backward()
    assert setup.grad == [1.0, 1.0]


@pytest.mark.parametrize("factor", [0.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_delayed_gradients_that_were_replaced_have_their_scale_still(dtype: torch.dtype, factor: float) -> None:
    def halve() -> None:
        assert setup.param.grad is not None
        setup.param.grad = setup.param.grad * 0.5

    setup = Setup(dtype=dtype)
    setup.backward(factor, delay_unscale=True)
    halve()
    setup.optimizer.step()
    assert setup.param.tolist() == ([0.875] * 2 if factor == 0.5 else [1.0] * 2)
    assert setup.scaler.loss_scale == (1024.0 if factor == 0.5 else 512.0)
    assert setup.guard.grads.scale == 1.0
    setup.optimizer.zero_grad()
    setup.backward(1.0, delay_unscale=True)
    halve()
    setup.backward(0.5)
    assert setup.grad == [1.0, 1.0]


def test_delayed_gradients_of_which_one_was_dropped_are_unscaled() -> None:
    setup, other = Setup(), Parameter(torch.ones(2))
    setup.optimizer.add_param_group({"params": [other]})
    with scale_loss((setup.param + other).sum(), setup.guard, setup.scaler, delay_unscale=True) as scaled:
        scaled.backward()
    other.grad = None
    setup.optimizer.step()
    assert (setup.param.tolist(), other.tolist()) == ([0.5, 0.5], [1.0, 1.0])


# -- several ranks --


def test_inf_that_a_reduction_brings_after_a_block_skips_the_step(fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(2)
    setup, others = Setup(), [DynamicLossScaler(8.0), DynamicLossScaler(16.0)]
    setup.backward(1.0)
    for other in others:
        with scale_loss(setup.param.sum(), setup.guard, other) as scaled:
            scaled.backward()
    assert setup.param.grad is not None
    setup.param.grad[0] = math.inf
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert setup.guard.skips.total == 1
    # The scaler of the last block is to blame.
    assert [scaler.loss_scale for scaler in (setup.scaler, *others)] == [1024.0, 8.0, 8.0]


# -- LR schedulers --


@pytest.mark.parametrize("factor", [1.0, math.inf], ids=["stepped", "skipped"])
@pytest.mark.parametrize("order", ["before", "after", "both", "twice guarded"])
def test_no_scheduler_warns(order: str, factor: float) -> None:
    param = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    schedulers = []
    if order in ("before", "both"):
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    if order == "twice guarded":
        guard_of(optimizer).uninstall()
    guard, scaler = guard_of(optimizer), DynamicLossScaler(4.0)
    if order != "before":
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for step_factor in (factor, 1.0):
        optimizer.zero_grad()
        with scale_loss((param * step_factor).sum(), guard, scaler) as scaled:
            scaled.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert guard.skips.total == (factor != 1.0)
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (1 + 2 * len(schedulers))


def test_under_a_scheduler_an_uninstalled_guard_lets_calls_pass() -> None:
    setup = Setup()
    torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    wrapper = setup.optimizer.step
    setup.backward(math.inf)
    setup.guard.uninstall()
    assert setup.optimizer.step is wrapper
    setup.param.grad = torch.ones(2)
    setup.optimizer.step()
    assert setup.param.tolist() == [0.5, 0.5]


# -- install, uninstall, lifetime --


def test_an_uninstalled_guard_restores_the_step_and_unscales() -> None:
    setup = Setup()
    setup.guard.uninstall()
    before = dict(vars(setup.optimizer))
    setup.guard.install()
    assert "step" in vars(setup.optimizer)
    setup.backward(1.0, delay_unscale=True)
    setup.guard.uninstall()
    setup.guard.uninstall()
    assert vars(setup.optimizer) == before
    assert setup.grad == [1.0, 1.0]
    setup.optimizer.step()
    assert (setup.param.tolist(), setup.guard.skips.steps) == ([0.5, 0.5], 0)


def test_a_guard_goes_with_its_optimizer() -> None:
    setup = Setup()
    setup.backward()
    setup.optimizer.step()
    setup.backward()
    gc.collect()
    gc.disable()
    try:
        optimizer, guard = weakref.ref(setup.optimizer), weakref.ref(setup.guard)
        param = weakref.ref(setup.param)
        del setup
        assert (optimizer(), guard(), param()) == (None, None, None)
    finally:
        gc.enable()


# -- skips in a row --


class Net(torch.nn.Module):
    """A layer that gets inf and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.good = Linear(2, 2, bias=False)
        self.bad = Linear(2, 2, bias=False)


def test_too_many_skips_name_the_parameters() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard, scaler = guard_of(optimizer, max_consecutive_skips=3), DynamicLossScaler(1024.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        with scale_loss(net.good.weight.sum() + net.bad.weight.sum() * factor, guard, scaler) as scaled:
            scaled.backward()
        optimizer.step()

    for factor in (math.nan, math.nan, 1.0, math.nan, math.nan):
        step(factor)
    with pytest.raises(NonFiniteGradientsError, match=r"3 steps of SGD .* first in Net\.bad\.weight;"):
        step(math.nan)
    assert (guard.skips.total, guard.skips.in_a_row) == (5, 3)


def test_the_default_is_fifty_skips() -> None:
    setup = Setup()
    for _ in range(49):
        setup.optimizer.zero_grad()
        setup.backward(math.inf)
        setup.optimizer.step()
    setup.backward(math.inf)
    with pytest.raises(NonFiniteGradientsError, match=r"param_groups\[0\]\['params'\]\[0\] of shape \(2,\)"):
        setup.optimizer.step()


# -- other optimizers --


def test_a_step_without_a_signature_is_guarded() -> None:
    class WrittenInC(dict[str, Any]):
        """Its step is a method of C, as those of compiled extensions are."""

        step = dict.clear

        def __init__(self, params: list[Parameter]) -> None:
            super().__init__(kept=1)
            self.param_groups = [{"params": params}]

    param = Parameter(torch.ones(2))
    optimizer = WrittenInC([param])
    guard, scaler = guard_of(optimizer), DynamicLossScaler(1024.0)
    for factor, left in ((math.inf, {"kept": 1}), (1.0, {})):
        param.grad = None
        with scale_loss((param * factor).sum(), guard, scaler) as scaled:
            scaled.backward()
        optimizer.step()
        assert optimizer == left


def test_masters_take_the_gradients_of_half_parameters() -> None:
    weight = Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = guard_of(optimizer, masters=MasterWeights(optimizer))
    (master,) = guard.grads.params()
    # Too small for an fp16 gradient, unless the scale is taken off in fp32.
    for _ in range(2):
        with scale_loss(weight.float().sum() * 2.0**-30, guard, DynamicLossScaler(2.0**16)) as scaled:
            scaled.backward()
    assert master.grad is not None
    assert master.grad.tolist() == [2.0**-29] * 2

    def failing() -> None:
        with scale_loss(weight.float().sum() * 2.0**-29, guard, DynamicLossScaler(2.0**16)) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert master.grad.tolist() == [2.0**-28] * 2


@pytest.mark.parametrize("when", ["before the step", "before the next block"])
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_gradients_of_parameters_added_after_a_block_are_unscaled_and_checked(when: str, factor: float) -> None:
    setup, late = Setup(), Parameter(torch.ones(2))

    def backward(factor: float) -> None:
        with scale_loss((setup.param + late * factor).sum(), setup.guard, setup.scaler) as scaled:
            scaled.backward()

    backward(factor)
    setup.optimizer.add_param_group({"params": [late]})
    if when == "before the next block":
        backward(1.0)
    setup.optimizer.step()
    assert setup.guard.skips.step.skipped is (factor != 1.0)
    steps = 0.0 if factor != 1.0 else 2.0 if when == "before the next block" else 1.0
    assert late.tolist() == setup.param.tolist() == [1.0 - 0.5 * steps] * 2
