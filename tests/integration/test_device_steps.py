"""Steps whose overflow flags stay on the device train, bit for bit, as those do whose flags are read.

Torch's fused optimizers take the flag of an overflow on a CPU too. Here flags of a CPU stay unread, as those of a GPU.
"""

from __future__ import annotations

import collections
import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.core import DynamicLossScaler, LossScaler, StaticLossScaler, UnreadFlags, runtime_of
from autoamp.errors import NonFiniteGradientsError
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.tools import OverflowTrace
from tests.waits import counted_reads

STEPS = 14
# Where a loss is inf, or so large that its scale alone makes it so.
BAD = {1: math.inf, 4: 2.0**120, 5: math.inf, 11: math.nan}


def scaler_of(late: bool, scale: float = 2.0**10, **kwargs: Any) -> DynamicLossScaler:
    scaler = DynamicLossScaler(scale, growth_interval=3, **kwargs)
    defer(scaler, late)
    return scaler


def defer(scaler: LossScaler, late: bool) -> None:
    if late:
        scaler.unread = UnreadFlags(("cpu",), batch=3)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that autoamp waits for a device. To explain a skip is to read what it was computed from."""
    monkeypatch.setattr(OverflowTrace, "step_skipped", lambda *_: None)
    return counted_reads(monkeypatch)


def end() -> None:
    handle = autoamp.core.current_handle()
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


def assert_same(train: Callable[[bool], tuple[list[Tensor], Any]]) -> Any:
    """Train with flags that are read and with flags that are not. Return what else both runs came to."""
    outcomes = []
    for late in (False, True):
        outcomes.append(train(late))
        end()
    (expected, *others), (got, *others_late) = outcomes
    assert same(expected, got)
    assert others == others_late
    return others[0]


def plain(
    handle: Any, model: nn.Module, optimizer: Any, step: int, *, parts: int = 1, delayed: int = 0, clips: bool = False
) -> None:
    """Train one step in several parts, of which the middle one may be bad, and the first ones are unscaled later."""
    optimizer.zero_grad()
    for part in range(parts):
        loss = loss_of(model, step if part == parts // 2 else 100, part)
        with handle.scale_loss(loss, optimizer, delay_unscale=part < delayed) as scaled:
            scaled.backward()
    if clips:
        nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), 0.1)
    optimizer.step()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "accumulated": {"parts": 3}, "delayed": {"parts": 3, "delayed": 2}, "all delayed": {"delayed": 1},
    "clipped": {"clips": True},
}  # fmt: skip
# The first scale, and how many of the steps may be read all the same: those after which it might be below 1.
SCALES: dict[str, tuple[float, Sequence[int]]] = {
    "dynamic": (2.0**10, [0]), "near 1": (4.0, range(1, STEPS)), "below 1": (0.5, [STEPS]), "static": (128.0, [0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "name", "scale", "half"),
    [
        *((way, "AdamW", "dynamic", torch.float16) for way in WAYS),
        *((way, "AdamW", one, torch.float16) for way in ("plain", "delayed") for one in SCALES if one != "dynamic"),
        *(("plain", name, "dynamic", torch.bfloat16) for name in OPTIMIZERS),
    ],
)
def test_training_is_the_same_with_flags_unread(
    way: str, name: str, scale: str, half: torch.dtype, reads: list[int]
) -> None:
    def train(late: bool) -> tuple[list[Tensor], Any]:
        first, read = SCALES[scale]
        scaler = StaticLossScaler(first) if scale == "static" else scaler_of(False, first)
        defer(scaler, late)
        handle = autoamp.init(dtype=half, loss_scale=scaler)
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        seen: list[Tensor] = []
        reads.clear()
        # After a skip at a fixed scale steps are recorded, to explain the next one, which reads what they compute.
        looked_at = min(BAD) if scale == "static" else STEPS
        for step in range(STEPS):
            plain(handle, model, optimizer, step, **WAYS[way])
            if step == looked_at - 1:
                assert len(reads) in (read if late else [looked_at])
            seen += everything(model, optimizer)
        return seen, (handle.state_dict(), handle.last_step_skipped, handle.stats["steps"])

    assert assert_same(train)[0]["skipped_steps"] == 4


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_each_level_trains_the_same_with_flags_unread(opt_level: str, reads: list[int]) -> None:
    def train(late: bool) -> tuple[list[Tensor], Any]:
        model = network()
        model, optimizer = autoamp.initialize(
            model, OPTIMIZERS["Adam"](model.parameters()), opt_level=opt_level, loss_scale="dynamic",
            dtype=torch.float16, verbosity=0,
        )  # fmt: skip
        handle = autoamp.core.current_handle()
        assert handle is not None
        defer(runtime_of(handle).optimizers.scalers[0], late)
        reads.clear()
        for step in range(STEPS):
            plain(handle, model, optimizer, step)
        assert len(reads) == (0 if late else STEPS)
        return everything(model, optimizer), handle.state_dict()

    assert_same(train)


def test_fp16_optimizer_trains_the_same_with_flags_unread(half: torch.dtype, reads: list[int]) -> None:
    def train(late: bool) -> tuple[list[Tensor], Any]:
        model = network(half)
        inner = OPTIMIZERS["AdamW"](model.parameters())
        optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 3})
        defer(optimizer.loss_scaler, late)
        reads.clear()
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(half)
            optimizer.backward(model(inputs).float().square().mean() * BAD.get(step, 1.0))
            optimizer.step()
        assert len(reads) == (0 if late else STEPS)
        return everything(model, optimizer), (optimizer.loss_scale, optimizer.overflow)

    assert_same(train)


@pytest.mark.parametrize(
    ("first", "second", "shared_block"),
    [("SGD", "Adam", True), ("SGD", "Adam", False), ("SGD", "foreach", True), ("foreach", "Adam", False)],
)
def test_two_optimizers_of_one_scaler_train_the_same_with_flags_unread(
    first: str, second: str, shared_block: bool
) -> None:
    make = {**OPTIMIZERS, "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True)}

    def train(late: bool) -> tuple[list[Tensor], Any]:
        scaler = scaler_of(late)
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler)
        model = network()
        both = [make[first](model[0].parameters()), make[second](model[2].parameters())]
        for step in range(STEPS):
            for given in [both] if shared_block else [both[:1], both[1:]]:
                for optimizer in both:
                    optimizer.zero_grad()
                good_for_second = given == both[1:] and step in (1, 4)
                with handle.scale_loss(loss_of(model, 100 + step if good_for_second else step), given) as scaled:
                    scaled.backward()
                for optimizer in given:
                    optimizer.step()
        # The scaler hears of a block of both once.
        assert scaler.overflows == (4 if shared_block else 6)
        return everything(model, *both), (handle.state_dict(), handle.last_step_skipped)

    assert_same(train)


@pytest.mark.parametrize("late", [False, True])
def test_of_several_losses_the_first_that_overflowed_is_blamed(late: bool) -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale="dynamic")
    model = network()
    optimizer = handle.wrap_optimizer(OPTIMIZERS["Adam"](model.parameters()), num_loss=3)
    for scaler in (scalers := runtime_of(handle).optimizers.scalers[-3:]):
        defer(scaler, late)
    counts = []
    for bad in ([], [1], [1, 2], [0], []):
        optimizer.zero_grad()
        for part in range(3):
            with optimizer.scale_loss(loss_of(model, 1 if part in bad else 0, part)) as scaled:
                scaled.backward()
        optimizer.step()
        counts.append([(scaler.unskipped, scaler.overflows) for scaler in scalers])
    # Those before it were clean, and of those after it nothing is known.
    assert counts == [
        [(1, 0), (1, 0), (1, 0)], [(2, 0), (0, 1), (1, 0)], [(3, 0), (0, 2), (1, 0)], [(0, 1), (0, 2), (1, 0)],
        [(1, 1), (1, 2), (2, 0)],
    ]  # fmt: skip
    assert handle.skipped_steps == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_second_step_by_the_gradients_of_a_skipped_one_changes_nothing(name: str) -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(late=True))
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in (0, 1):
        plain(handle, model, optimizer, step)
        after_one = everything(model, optimizer)
        optimizer.step()
        # The first of them has gradients that are good for another step.
        assert same(everything(model, optimizer), after_one) is (step == 1)


def test_a_checkpoint_in_the_middle_resumes_bit_for_bit() -> None:
    def made() -> tuple[Any, nn.Module, Any]:
        model = network()
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
        return handle, model, OPTIMIZERS["AdamW"](model.parameters())

    def end_of(things: tuple[Any, nn.Module, Any]) -> tuple[list[Tensor], Any]:
        handle, model, optimizer = things
        for step in range(6, STEPS):
            plain(handle, model, optimizer, step)
        return everything(model, optimizer), handle.state_dict()

    things = made()
    for step in range(6):
        plain(*things, step)
    saved = copy.deepcopy([thing.state_dict() for thing in things])
    expected, state = end_of(things)
    end()
    things = made()
    for thing, of_thing in zip(things, saved, strict=True):
        thing.load_state_dict(of_thing)
    got, resumed = end_of(things)
    assert same(expected, got)
    assert resumed == state


@pytest.mark.parametrize(
    "ask",
    [
        lambda handle: handle.skipped_steps,
        lambda handle: handle.last_step_skipped,
        lambda handle: handle.loss_scale,
        lambda handle: handle.state_dict()["skipped_steps"],
    ],
)
def test_asking_for_skips_or_the_scale_waits_for_the_device(
    ask: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the steps after a skip are recorded, and their flags are read at once.
    monkeypatch.setattr(OverflowTrace, "step_skipped", lambda *_: None)
    answers = []
    for late in (False, True):
        scaler = scaler_of(late)
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler)
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        answers.append([])
        for step in range(3):
            plain(handle, model, optimizer, step)
            assert len(scaler.unread) == late
            answers[-1].append(ask(handle))
            assert not len(scaler.unread)
        handle.deactivate()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_too_many_skips_are_an_error_soon_after() -> None:
    handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
    handle.max_consecutive_skips = 5
    model = network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    before = everything(model)
    # A program that goes on is told again, after as many skips.
    for most in (14, 28):
        with pytest.raises(NonFiniteGradientsError, match=r"of AdamW in a row were.* first in Sequential\.0\.w"):
            collections.deque((plain(handle, model, optimizer, 1) for _ in range(20)), maxlen=0)
        assert 5 <= handle.skipped_steps <= most
        assert same(before, everything(model))


def test_skips_are_logged_with_the_scale_they_had(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        handle = autoamp.init(dtype=torch.float16, loss_scale=scaler_of(True))
        model = network()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        for step in range(STEPS):
            plain(handle, model, optimizer, step)
        assert handle.skipped_steps == 4
    assert [record.getMessage() for record in caplog.records if record.name.startswith("autoamp.core")] == [
        "SGD: step skipped, gradients overflowed at loss scale 1024, the next is 512 (skipped 1, in a row 1)",
        "SGD: step skipped, gradients overflowed at loss scale 512, the next is 256 (skipped 2, in a row 1)",
        "SGD: step skipped, gradients overflowed at loss scale 256, the next is 128 (skipped 4, in a row 1)",
    ]


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
