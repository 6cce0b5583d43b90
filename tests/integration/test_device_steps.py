"""Steps whose verdicts stay on the device train, bit for bit, as those do whose verdicts are read.

Torch's fused optimizers take the flag of an overflow on a CPU too. Here flags of a CPU are late as those of a GPU are.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.errors import NonFiniteGradientsError
from autoamp.fp16_utils.fp16_optimizer import FP16_Optimizer
from autoamp.runtime import runtime_of
from autoamp.scaling import verdict
from autoamp.scaling.device_scale import DeviceScale
from autoamp.scaling.late_flags import LateFlags
from autoamp.scaling.loss_scale import DynamicLossScaler, LossScaler, StaticLossScaler

STEPS = 14
# Where a loss is inf, or so large that its scale alone makes it so.
BAD = {1: math.inf, 4: 2.0**120, 5: math.inf, 11: math.nan}


class Parcel:
    """Flags that are there at the second time of asking."""

    def __init__(self, flags: Sequence[Tensor]) -> None:
        self._flags, self._asked = list(flags), 0

    def arrived(self) -> bool:
        self._asked += 1
        return self._asked > 2

    def flags(self) -> list[bool]:
        return [bool(flag) for flag in self._flags]


def scaler_of(late: bool, scale: float = 2.0**10, **kwargs: Any) -> DynamicLossScaler:
    scaler = DynamicLossScaler(scale, growth_interval=3, **kwargs)
    defer(scaler, late)
    return scaler


def defer(scaler: LossScaler, late: bool) -> None:
    if late:
        scaler.late = LateFlags(Parcel, lambda device: True, batch=3)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that a step reads flags."""
    found_any, times = verdict.found_any, []
    monkeypatch.setattr(verdict, "found_any", lambda found: times.append(len(found)) or found_any(found))
    return times


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    handle = autoamp.runtime.current_handle()
    if handle is not None:
        handle.deactivate()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + part))
    return model(inputs).float().square().mean() * BAD.get(step, 1.0)


def everything(model: nn.Module, *optimizers: Any) -> list[Tensor]:
    """Return copies of all weights and all state."""
    state = [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        for value in (param, *optimizer.state[param].values())
        if isinstance(value, Tensor)
    ]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# Each trains one step of `optimizer`, and of others that it makes.


def plain(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, step), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def accumulated(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        with handle.scale_loss(loss_of(model, step if part == 1 else 100, part), optimizer) as scaled:
            scaled.backward()
    optimizer.step()


def delayed(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        with handle.scale_loss(loss_of(model, step, part), optimizer, delay_unscale=part < 2) as scaled:
            scaled.backward()
    optimizer.step()


def all_delayed(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, step), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    optimizer.step()


def clipped(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, step), optimizer) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), 0.1)
    optimizer.step()


WAYS = [plain, accumulated, delayed, all_delayed, clipped]


@pytest.mark.parametrize(
    ("way", "name", "scale", "half"),
    [
        *((way, "AdamW", scale, torch.float16) for way in WAYS for scale in ("dynamic", "below 1", 128.0)),
        *((plain, name, "dynamic", torch.bfloat16) for name in OPTIMIZERS),
    ],
)
def test_training_is_the_same(way: Any, name: str, scale: Any, half: torch.dtype, reads: list[int]) -> None:
    outcomes = []
    for late in (False, True):
        if scale == 128.0:
            scaler: Any = StaticLossScaler(scale)
            defer(scaler, late)
        else:
            scaler = scaler_of(late, 2.0**10 if scale == "dynamic" else 2.0**-1)
        handle = autoamp.init(dtype=half, loss_scale=scaler)
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        seen = []
        reads.clear()
        for step in range(STEPS):
            way(handle, model, optimizer, step)
            seen.append(everything(model, optimizer))
        assert len(reads) == (0 if late else STEPS)
        assert bool(len(scaler.late)) is late
        outcomes.append((seen, handle.state_dict(), handle.last_step_skipped, runtime_of(handle).optimizers.steps))
        handle.deactivate()
    (expected, *state), (got, *late_state) = outcomes
    assert all(map(same, expected, got))
    assert state == late_state
    assert state[0]["skipped_steps"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_any_scale_in_any_precision(dtype: torch.dtype, factors: tuple[float, float]) -> None:
    outcomes = []
    for late in (False, True):
        handle = autoamp.init(
            dtype=torch.float16,
            loss_scale=scaler_of(late, 1000.1, growth_factor=factors[0], backoff_factor=factors[1]),
        )
        model = network(dtype)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            with handle.disable_casts():
                for part in range(2):
                    inputs = torch.randn(6, 8, dtype=dtype, generator=torch.Generator().manual_seed(step + part))
                    loss = model(inputs).square().mean() * (math.inf if step in BAD else 1.0)
                    with handle.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
            optimizer.step()
        outcomes.append((everything(model, optimizer), handle.state_dict()))
        handle.deactivate()
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_levels(opt_level: str, half: torch.dtype, reads: list[int]) -> None:
    outcomes = []
    for late in (False, True):
        model = network()
        model, optimizer = autoamp.initialize(
            model, OPTIMIZERS["Adam"](model.parameters()), opt_level=opt_level, loss_scale="dynamic", dtype=half,
            verbosity=0,
        )  # fmt: skip
        handle = autoamp.runtime.current_handle()
        assert handle is not None
        defer(runtime_of(handle).optimizers.scalers[0], late)
        reads.clear()
        for step in range(STEPS):
            plain(handle, model, optimizer, step)
        assert len(reads) == (0 if late else STEPS)
        outcomes.append((everything(model, optimizer), handle.state_dict()))
        handle.deactivate()
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def test_fp16_optimizer(half: torch.dtype, reads: list[int]) -> None:
    outcomes = []
    for late in (False, True):
        model = network(half)
        optimizer = FP16_Optimizer(
            OPTIMIZERS["AdamW"](model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 3}
        )
        defer(optimizer.loss_scaler, late)
        reads.clear()
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(half)
            optimizer.backward(model(inputs).float().square().mean() * BAD.get(step, 1.0))
            optimizer.step()
        assert len(reads) == (0 if late else STEPS)
        outcomes.append((everything(model, optimizer), optimizer.loss_scale, optimizer.overflow))
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


@pytest.mark.parametrize("shared_block", [True, False])
@pytest.mark.parametrize("second", ["Adam", "foreach"])
@pytest.mark.parametrize("first", ["SGD", "foreach"])
def test_two_optimizers_of_one_scaler(first: str, second: str, shared_block: bool, reads: list[int]) -> None:
    make = {**OPTIMIZERS, "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True)}
    outcomes = []
    for late in (False, True):
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(late))
        model = network()
        both = [make[first](model[0].parameters()), make[second](model[2].parameters())]
        for step in range(STEPS):
            for blocks in ([both],) if shared_block else ([both[0]], [both[1]]):
                for optimizer in both:
                    optimizer.zero_grad()
                given = blocks[0] if shared_block else blocks
                good_for_second = given == [both[1]] and step in (1, 4)
                with handle.scale_loss(loss_of(model, 100 + step if good_for_second else step), given) as scaled:
                    scaled.backward()
                for optimizer in given:
                    optimizer.step()
        outcomes.append((everything(model, *both), handle.state_dict(), handle.last_step_skipped))
        handle.deactivate()
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


def test_what_a_step_leaves_unread_comes_with_what_another_must_read(reads: list[int]) -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    sent: list[int] = []
    runtime_of(handle).optimizers.scalers[0].late = LateFlags(
        lambda flags: sent.append(len(flags)) or Parcel(flags), lambda device: True
    )
    model = network()
    left, right = OPTIMIZERS["SGD"](model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)
    for optimizer in (left, right):
        with handle.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert (sent, reads) == ([2], [])


def test_losses_with_scalers_of_their_own() -> None:
    outcomes = []
    for late in (False, True):
        handle = autoamp.init(dtype=torch.float16, loss_scale="dynamic")
        model = network()
        optimizer = handle.wrap_optimizer(OPTIMIZERS["Adam"](model.parameters()), num_loss=2)
        for scaler in runtime_of(handle).optimizers.scalers:
            defer(scaler, late)
        for step in range(STEPS):
            optimizer.zero_grad()
            # Steps of two losses, whose verdicts are read, between steps of one.
            for part in range(1 + step % 2):
                with optimizer.scale_loss(loss_of(model, step, part)) as scaled:
                    scaled.backward()
            optimizer.step()
        outcomes.append((everything(model, optimizer), handle.state_dict(), handle.skipped_steps))
        handle.deactivate()
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


def closed(handle: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)


def test_closures_are_evaluated_on_the_host() -> None:
    outcomes = []
    for late in (False, True):
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(late))
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        for step in range(STEPS):
            (plain if step % 3 else closed)(handle, model, optimizer, step)
        outcomes.append((everything(model, optimizer), handle.state_dict()))
        handle.deactivate()
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def test_a_checkpoint_in_the_middle_resumes_bit_for_bit() -> None:
    def run(model: nn.Module, optimizer: Any, handle: Any, steps: range) -> None:
        for step in steps:
            plain(handle, model, optimizer, step)

    def made() -> tuple[nn.Module, Any, Any]:
        model = network()
        return (
            model,
            OPTIMIZERS["AdamW"](model.parameters()),
            autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True)),
        )

    model, optimizer, handle = made()
    run(model, optimizer, handle, range(6))
    saved = copy.deepcopy([thing.state_dict() for thing in (model, optimizer, handle)])
    run(model, optimizer, handle, range(6, STEPS))
    expected = everything(model, optimizer), handle.state_dict()
    handle.deactivate()
    model, optimizer, handle = made()
    for thing, state in zip((model, optimizer, handle), saved, strict=True):
        thing.load_state_dict(state)
    run(model, optimizer, handle, range(6, STEPS))
    assert same(expected[0], everything(model, optimizer))
    assert handle.state_dict() == expected[1]


ASKED: list[Callable[[Any, Any], Any]] = [
    lambda handle, guard: handle.skipped_steps,
    lambda handle, guard: handle.last_step_skipped,
    lambda handle, guard: handle.loss_scale,
    lambda handle, guard: handle.state_dict()["skipped_steps"],
    lambda handle, guard: guard.skips.total,
    lambda handle, guard: guard.skips.last,
    lambda handle, guard: guard.skips.in_a_row,
    lambda handle, guard: guard.overflowed(),
]


@pytest.mark.parametrize("ask", ASKED)
def test_to_ask_is_to_wait(ask: Callable[[Any, Any], Any]) -> None:
    answers = []
    for late in (False, True):
        scaler = scaler_of(late)
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler)
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        answers.append([])
        for step in range(3):
            plain(handle, model, optimizer, step)
            assert len(scaler.late) == late
            answers[-1].append(ask(handle, runtime_of(handle).optimizers.guard(optimizer)))
            assert not scaler.late
        handle.deactivate()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_the_scale_of_a_block_is_left_on_the_device() -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    model = network()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    plain(handle, model, optimizer, 1)
    with handle.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scale = runtime_of(handle).optimizers.guard(optimizer).grads_scale
        assert isinstance(scale, DeviceScale)
        with pytest.raises(autoamp.UsageError, match="are still multiplied by 512"):
            optimizer.step()
        scaled.backward()


def skip_on(handle: Any, model: nn.Module, optimizer: Any) -> None:
    for _ in range(20):
        plain(handle, model, optimizer, 1)


def test_too_many_skips_are_an_error_soon_after(half: torch.dtype) -> None:
    handle = autoamp.init(dtype=half, loss_scale=scaler_of(True))
    handle.max_consecutive_skips = 5
    model = network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    before = everything(model)
    with pytest.raises(
        NonFiniteGradientsError, match=r"steps of AdamW in a row were skipped.* first in Sequential.0.w"
    ):
        skip_on(handle, model, optimizer)
    assert 5 <= handle.skipped_steps <= 5 + 3 * 3
    assert same(before, everything(model))
    # Who goes on all the same is told again.
    with pytest.raises(NonFiniteGradientsError):
        skip_on(handle, model, optimizer)


def test_skips_are_logged_with_the_scale_they_had(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        for step in range(STEPS):
            plain(handle, model, optimizer, step)
        assert handle.skipped_steps == 4
    assert [record.getMessage() for record in caplog.records if record.name.startswith("autoamp.stepping")] == [
        "SGD: step skipped, gradients overflowed at loss scale 1024, the next is 512 (skipped 1, in a row 1)",
        "SGD: step skipped, gradients overflowed at loss scale 512, the next is 256 (skipped 2, in a row 1)",
        "SGD: step skipped, gradients overflowed at loss scale 256, the next is 128 (skipped 4, in a row 1)",
    ]


def test_skips_of_an_optimizer_that_is_gone_count() -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    model = network()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    for step in (0, 1):
        plain(handle, model, optimizer, step)
    del optimizer
    assert handle.skipped_steps == 1


def test_a_scheduler_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    model = network()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in (1, 2):
        plain(handle, model, optimizer, step)
        scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler.step" in str(warning.message)]


class Averaging(torch.optim.AdamW):
    """Does more in a step than what it has from torch."""

    stepped = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.stepped += 1


class WantsScaler(torch.optim.AdamW):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        super().step()


def hooked(params: Any) -> Any:
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: steps_seen.append(optimizer))
    return optimizer


steps_seen: list[Any] = []


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Averaging(params, fused=True),
        lambda params: WantsScaler(params, fused=True),
        lambda params: torch.optim.AdamW(params, foreach=True),
        hooked,
    ],
)
def test_whose_step_may_not_run_for_nothing_is_skipped_by_the_guard(make: Any, reads: list[int]) -> None:
    steps_seen.clear()
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    model = network()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        plain(handle, model, optimizer, step)
    assert len(reads) == STEPS
    assert handle.skipped_steps == 4
    assert getattr(optimizer, "stepped", STEPS - 4) == STEPS - 4
    assert len(steps_seen) in (0, STEPS - 4)


def test_the_flag_of_an_overflow_is_gone_after_the_step() -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    model = network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    plain(handle, model, optimizer, 0)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_second_step_by_the_gradients_of_a_skipped_one_changes_nothing(name: str) -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(late=True))
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in (0, 1):
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(model, step), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        after_one = everything(model, optimizer)
        optimizer.step()
        # The first of them has gradients that are good for another step.
        assert same(everything(model, optimizer), after_one) is (step == 1)
