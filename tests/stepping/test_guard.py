"""What the step of a guarded optimizer does after blocks of a scaled loss."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from autoamp.errors import AutoampError, NonFiniteGradientsError, UsageError
from autoamp.scaling import DynamicLossScaler, StaticLossScaler
from autoamp.stepping import MasterWeights, scaled_block
from tests.stepping.guarded import Setup, guard_of, scale_loss

pytestmark = pytest.mark.filterwarnings("error")


# -- one block, one step --


def test_a_clean_step(half: torch.dtype) -> None:
    for dtype in (torch.float32, half):
        setup = Setup(dtype=dtype)
        setup.backward(0.25)
        assert setup.grad == [0.25, 0.25]
        setup.optimizer.step()
        assert setup.param.tolist() == [0.875, 0.875]
        assert (setup.guard.skips.steps, setup.guard.skips.total, setup.guard.skips.last) == (1, 0, False)
        assert setup.scaler.unskipped == 1


OPTIMIZERS: list[Callable[..., Any]] = [
    lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    torch.optim.Adam,
    lambda params, lr: torch.optim.AdamW(params, lr, foreach=False),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "adamw"])
def test_a_skip_leaves_everything_as_it_was(optimizer: Callable[..., Any]) -> None:
    setup = Setup(optimizer)
    hooks: list[str] = []
    setup.optimizer.register_step_pre_hook(lambda *_: hooks.append("pre"))
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
    assert (setup.guard.skips.total, setup.guard.skips.in_a_row, setup.guard.skips.last) == (1, 1, True)
    assert (setup.scaler.loss_scale, setup.scaler.unskipped) == (512.0, 0)
    setup.optimizer.zero_grad()
    setup.backward()
    setup.optimizer.step()
    assert hooks == ["pre", "post"]
    assert (setup.guard.skips.total, setup.guard.skips.in_a_row, setup.guard.skips.last) == (1, 0, False)
    assert setup.guard.skips.steps == 3


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


def test_a_static_scale_skips_too() -> None:
    setup = Setup()
    setup.scaler = StaticLossScaler(128.0)  # type: ignore[assignment]
    setup.backward(math.nan)
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert setup.scaler.loss_scale == 128.0


def test_the_outcome_can_be_asked_for_before_the_step(reads: list[int]) -> None:
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


def test_one_reading_a_step(reads: list[int], passes: list[str]) -> None:
    setup = Setup()
    for _ in range(3):
        setup.optimizer.zero_grad()
        setup.backward()
        assert passes == ["unscale_"]
        assert reads == []
        setup.optimizer.step()
        assert reads == [1]
        reads.clear()
        passes.clear()


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


class Plain:
    """An optimizer of no class of torch."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params)}]

    def step(self) -> str:
        for param in self.param_groups[0]["params"]:
            param.data -= param.grad
        return "stepped"


def test_any_optimizer_will_do() -> None:
    param = Parameter(torch.ones(2))
    optimizer, scaler = Plain([param]), DynamicLossScaler(4.0)
    guard = guard_of(optimizer)
    for factor, expected in ((0.5, "stepped"), (math.inf, None)):
        param.grad = None
        with scale_loss((param * factor).sum(), guard, scaler) as scaled:
            scaled.backward()
        assert optimizer.step() == expected
    assert param.tolist() == [0.5, 0.5]


# -- several blocks a step --


def trained(steps: int, scaled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(3, 5), torch.nn.Tanh(), Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    guard, scaler = guard_of(optimizer), DynamicLossScaler(2.0**16, growth_interval=2)
    batches = torch.randn(steps, 4, 8, 3)
    for micro_batches in batches:
        optimizer.zero_grad()
        for batch in micro_batches:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 4
            if scaled:
                with scale_loss(loss, guard, scaler) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        optimizer.step()
    assert not scaled or scaler.loss_scale == 2.0 ** min(24, 16 + steps // 2)
    return [param.detach() for param in model.parameters()]


def test_micro_batches_train_bitwise_as_without_a_scale() -> None:
    assert all(map(torch.equal, trained(6, scaled=True), trained(6, scaled=False)))


def test_micro_batches_are_one_step_for_the_scaler(reads: list[int]) -> None:
    setup = Setup()
    for _ in range(4):
        setup.backward(0.25)
    assert reads == []
    setup.optimizer.step()
    assert reads == [4]
    assert setup.scaler.unskipped == 1
    assert setup.param.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("bad", range(3))
def test_any_micro_batch_can_overflow(bad: int) -> None:
    setup = Setup()
    for index in range(3):
        setup.backward(math.inf if index == bad else 1.0)
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert (setup.scaler.loss_scale, setup.scaler.unskipped) == (512.0, 0)
    assert setup.guard.skips.total == 1


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_an_abandoned_window_is_settled_and_not_skipped(factor: float) -> None:
    setup = Setup()
    setup.backward(factor)
    setup.optimizer.zero_grad()
    with scale_loss(setup.param.sum(), setup.guard, setup.scaler) as scaled:
        # The scale is that of after the settling.
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


def test_gradients_that_nobody_wrote_to_are_not_read_between_micro_batches(reads: list[int]) -> None:
    setup = Setup()
    for _ in range(2):
        for _ in range(3):
            setup.backward()
        assert reads == []
        setup.optimizer.step()
        reads.clear()
        setup.optimizer.zero_grad(set_to_none=False)


# -- delay_unscale --


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_step_after_a_delayed_block_unscales_and_checks(factor: float) -> None:
    setup = Setup()
    setup.backward(factor, delay_unscale=True)
    setup.optimizer.step()
    assert setup.param.tolist() == ([0.5, 0.5] if factor == 1.0 else [1.0, 1.0])
    assert setup.scaler.loss_scale == (1024.0 if factor == 1.0 else 512.0)
    assert setup.guard.grads.scale == 1.0


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


def halved(setup: Setup) -> None:
    assert setup.param.grad is not None
    setup.param.grad = setup.param.grad * 0.5


def test_delayed_gradients_that_were_replaced_have_their_scale_still(half: torch.dtype) -> None:
    for dtype in (torch.float32, half):
        setup = Setup(dtype=dtype)
        setup.backward(0.5, delay_unscale=True)
        halved(setup)
        setup.optimizer.step()
        assert setup.param.tolist() == [0.875, 0.875]
        assert setup.guard.grads.scale == 1.0
        setup.optimizer.zero_grad()
        setup.backward(1.0, delay_unscale=True)
        halved(setup)
        setup.backward(0.5)
        assert setup.grad == [1.0, 1.0]


def test_delayed_gradients_that_overflowed_and_were_replaced_skip() -> None:
    setup = Setup()
    setup.backward(math.inf, delay_unscale=True)
    halved(setup)
    setup.optimizer.step()
    assert setup.param.tolist() == [1.0, 1.0]
    assert setup.scaler.loss_scale == 512.0


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


def test_uninstall_restores_and_unscales() -> None:
    setup = Setup()
    assert "step" in vars(setup.optimizer)
    setup.backward(1.0, delay_unscale=True)
    setup.guard.uninstall()
    setup.guard.uninstall()
    assert "step" not in vars(setup.optimizer)
    assert setup.grad == [1.0, 1.0]
    assert setup.guard.checks.pending == []


def test_cycles_leave_nothing_behind() -> None:
    setup = Setup()
    setup.guard.uninstall()
    before = dict(vars(setup.optimizer))
    for _ in range(50):
        guard_of(setup.optimizer).uninstall()
    assert vars(setup.optimizer) == before


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


@pytest.mark.parametrize("make", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_is_not_guarded(make: Callable[[Any], Any]) -> None:
    setup = Setup()
    setup.backward(math.inf)
    clone = make(setup.optimizer)
    assert "step" not in vars(clone)
    clone.param_groups[0]["params"][0].grad = torch.ones(2)
    clone.step()
    assert setup.guard.skips.steps == 0
    assert setup.param.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("thing", [object(), Linear(1, 1)])
def test_only_optimizers_are_guarded(thing: Any) -> None:
    with pytest.raises((UsageError, TypeError)):
        guard_of(thing)


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


# -- contexts and callbacks --


class Switch:
    """Records whether casts are on."""

    def __init__(self) -> None:
        self.on = True

    @contextlib.contextmanager
    def to(self, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def bound(self, function: Any, on: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.to(on):
                return function(*args, **kwargs)

        return run


class Watched(torch.optim.SGD):
    """Tells whether casts are on while it steps."""

    def __init__(self, params: Any, switch: Switch, lr: float = 0.5) -> None:
        super().__init__(params, lr)
        self.switch = switch
        self.seen: list[bool] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen.append(self.switch.on)
        losses = [float(closure()) for _ in range(2)] if closure else None
        super().step()
        self.seen.append(self.switch.on)
        return losses


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


def test_the_step_runs_with_casts_off_and_a_closure_with_casts_on() -> None:
    switch, param, after, inside = Switch(), Parameter(torch.ones(2)), [], []
    optimizer, scaler = Watched([param], switch), DynamicLossScaler(4.0)
    guard = guard_of(
        optimizer,
        casts=types.SimpleNamespace(
            local=switch,
            evaluating=lambda: switch.to(True),
            cache=types.SimpleNamespace(clear=lambda: after.append(switch.on)),
        ),
    )

    def closure() -> Tensor:
        inside.append((switch.on, torch.is_grad_enabled()))
        optimizer.zero_grad()
        with scale_loss(param.sum(), guard, scaler) as scaled:
            scaled.backward()
        return param.sum()

    closure()
    optimizer.step()
    assert (optimizer.seen, after) == ([False, False], [True])
    inside.clear()
    assert optimizer.step(closure) == [1.0, 1.0]
    assert inside == [(True, True)] * 2
    assert optimizer.seen == [False] * 4
    # Before each evaluation, as an optimizer may have moved the parameters, and after the step.
    assert after == [True, False, False, True]
    with switch.to(False):
        optimizer.step(closure=closure)
    assert inside == [(True, True)] * 4


def test_casts_are_dropped_after_skips_and_errors() -> None:
    calls: list[int] = []
    param = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    cache = types.SimpleNamespace(clear=lambda: calls.append(guard.skips.total))
    casts = types.SimpleNamespace(cache=cache, local=Switch())
    guard = guard_of(optimizer, casts=casts, max_consecutive_skips=2)
    for _ in range(2):
        with scale_loss(param.sum() * math.inf, guard, DynamicLossScaler()) as scaled:
            scaled.backward()
        with contextlib.suppress(NonFiniteGradientsError):
            optimizer.step()
    assert calls == [1, 2]
    param.grad = torch.ones(2)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert calls == [1, 2, 2]


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


def test_errors_are_of_the_family() -> None:
    assert issubclass(NonFiniteGradientsError, AutoampError)
    assert issubclass(UsageError, AutoampError)


def test_delayed_gradients_of_which_one_was_dropped_are_unscaled() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    guard = guard_of(optimizer)
    with scaled_block([guard], StaticLossScaler(128.0), delay_unscale=True) as scale:
        ((first + second).sum() * scale).backward()
    first.grad = None
    optimizer.step()
    assert (first.item(), second.item()) == (0.0, -1.0)


@pytest.mark.parametrize("when", ["before the step", "before the next block"])
def test_what_joins_the_optimizer_after_a_block_has_true_gradients(when: str) -> None:
    setup, late = Setup(), Parameter(torch.ones(2))
    with scale_loss((setup.param + late).sum(), setup.guard, setup.scaler) as scaled:
        scaled.backward()
    setup.optimizer.add_param_group({"params": [late]})
    if when == "before the next block":
        with scale_loss((setup.param + late).sum(), setup.guard, setup.scaler) as scaled:
            scaled.backward()
    setup.optimizer.step()
    expected = 1.0 - 0.5 * (2.0 if when == "before the next block" else 1.0)
    assert late.tolist() == setup.param.tolist() == [expected] * 2


def test_an_overflow_in_what_joins_the_optimizer_after_a_block_skips_the_step() -> None:
    setup, late = Setup(), Parameter(torch.ones(2))
    with scale_loss(setup.param.sum() + (late * math.inf).sum(), setup.guard, setup.scaler) as scaled:
        scaled.backward()
    setup.optimizer.add_param_group({"params": [late]})
    setup.optimizer.step()
    assert setup.guard.skips.last
    assert setup.param.tolist() == late.tolist() == [1.0, 1.0]
