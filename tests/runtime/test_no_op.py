"""The handle of `init(enabled=False)`: it has all that a handle has, and does nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import autoamp
from autoamp.runtime.handle import Handle
from autoamp.runtime.no_op import NoOpHandle
from tests.runtime.shared import Training, init

# What init() and initialize() call; what a user of a handle never does.
FOR_OTHER_PACKAGES = {
    "inherit",
    "install_anew",
    "let_go",
    "setups",
    "steps_halves",
    "activate",
    "ended",
    "suspend",
    "patch",
    "set_up_model",
    "keep_masters",
    "step_halves",
    "look_at_values",
    "on_model",
    "on_step",
}

# What a handle is composed of.
PARTS = {"settings", "casts", "precisions", "models", "optimizers"}


def public(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def test_the_no_op_handle_has_every_public_name() -> None:
    def names(handle: object) -> set[str]:
        return {name for name in dir(handle) if not name.startswith("_")}

    assert names(init()) - FOR_OTHER_PACKAGES - PARTS == names(NoOpHandle())


@pytest.mark.parametrize("name", sorted(name for name, value in public(NoOpHandle).items() if inspect.isroutine(value)))
def test_the_no_op_handle_takes_the_same_arguments(name: str) -> None:
    def shape(kind: type) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(getattr(kind, name)).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert shape(NoOpHandle) == shape(Handle)


def test_disabled_nothing_happens(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    handle = autoamp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert autoamp.current_handle() is None
    loss = training.loss()
    assert loss.dtype is torch.float32
    before = dict(vars(optimizer))
    with handle.scale_loss(loss, optimizer, 3, delay_unscale=True) as scaled:
        assert scaled is loss
        scaled.backward()
    assert vars(optimizer) == before
    optimizer.step()
    with (
        handle.disable_casts(),
        handle.inference(model) as same,
        handle.override(model),
        handle.override(model, "fp32"),
    ):
        assert same is model
        assert model(training.inputs).dtype is torch.float32
    handle.cache.clear()
    assert len(handle.cache) == 0
    assert (handle.loss_scale, handle.skipped_steps, handle.last_step_skipped) == (1.0, 0, False)
    assert (handle.late_bound, handle.skipped_rules, handle.deactivate()) == ((), (), ())
    assert not handle.is_active()
    handle.max_consecutive_skips = 3
    assert NoOpHandle().max_consecutive_skips == init().max_consecutive_skips
    handle.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    assert handle.state_dict() == {}


def test_disabled_a_wrapped_optimizer_scales_nothing(training: Training) -> None:
    optimizer = autoamp.init(enabled=False).wrap_optimizer(training.optimizer, num_loss=2)
    assert optimizer is training.optimizer
    loss = training.loss()
    with optimizer.scale_loss(loss) as first, optimizer.scale_loss(loss, delay_unscale=True) as second:
        assert first is second is loss
    assert optimizer.step() is None


def test_disabled_diagnostics_find_nothing_and_followers_step(training: Training) -> None:
    handle = autoamp.init(enabled=False)
    with handle.trace() as trace, handle.profile_ranges() as ranges, handle.count() as counts:
        loss = training.loss()
        loss.backward()
    assert (trace.rows, counts.ops) == ((), {})
    assert any(row["op"] == "aten::addmm" for row in ranges.to_dict()["ops"])
    assert handle.explain("softmax").rules == ()
    assert handle.explain_overflow(training.loss) is None
    assert set(handle.stats) == set(init().stats)
    assert (handle.overflows, handle.postfix()) == ((), {"scale": "1", "skipped": "0"})
    handle.log_to(None)()
    stepped: list[int] = []
    end = handle.follow(lambda: stepped.append(1))
    training.optimizer.step()
    end()
    training.optimizer.step()
    assert stepped == [1]
    handle.follow(lambda: stepped.append(2))
    handle.deactivate()
    training.optimizer.step()
    assert stepped == [1]


def test_an_override_of_nothing_can_be_undone() -> None:
    handle = autoamp.init(enabled=False)
    handle.override(torch.nn.Linear(2, 2), "fp32").undo()


def test_init_disabled_returns_it() -> None:
    handle = autoamp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert not handle.is_active()
    assert not handle.auto_scale().active
    assert handle.deactivate() == ()
