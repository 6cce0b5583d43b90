"""The handle: how scale_loss and wrap_optimizer are used and misused, its lifecycle, and its checkpoints."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.core import Handle, LossScaler, runtime_of
from autoamp.errors import UsageError
from tests.core.runtime.shared import Training, init, steps

# -- from init() to deactivate() --


def test_deactivate_gives_everything_back(training: Training) -> None:
    handle, other = init(), Training()
    steps(handle, training, 1.0)
    other.optimizer = handle.wrap_optimizer(other.optimizer)
    with other.optimizer.scale_loss(other.loss()) as scaled:
        scaled.backward()
    handle.override(training.model, "fp32")
    assert "step" in vars(training.optimizer)
    assert handle.deactivate() == ()
    assert not handle.is_active()
    assert autoamp.current_handle() is None
    for one in (training, other):
        assert not {"step", "scale_loss"} & vars(one.optimizer).keys()
        assert one.model(one.inputs).dtype is torch.float32
        one.optimizer.step()
    assert vars(training.model).keys() == vars(Training().model).keys()
    assert handle.deactivate() == ()


def test_a_handle_shows_users_what_is_for_them_whether_it_is_enabled_or_not(handle: Handle) -> None:
    """Every public name is documented at the base class."""
    for one in (handle, autoamp.init(enabled=False)):
        assert isinstance(one, autoamp.BaseHandle)
        assert {name for name in dir(one) if not name.startswith("_")} == {
            name for name in dir(autoamp.BaseHandle) if not name.startswith("_")
        }


@pytest.mark.parametrize("call", ["scale_loss", "wrap_optimizer"])
def test_an_inactive_handle_says_so(training: Training, handle: Handle, call: str) -> None:
    handle.deactivate()
    arguments = (training.loss(), training.optimizer) if call == "scale_loss" else (training.optimizer,)
    with pytest.raises(UsageError, match=r"this handle is not active; call autoamp.init\(\) and use the handle that"):
        getattr(handle, call)(*arguments)
    assert not {"step", "scale_loss"} & vars(training.optimizer).keys()


def test_deactivate_within_a_block_leaves_true_gradients(training: Training, handle: Handle) -> None:
    wanted = torch.autograd.grad(training.loss(), training.model.weight)[0]
    with handle.scale_loss(training.loss(), training.optimizer) as scaled:
        scaled.backward()
        handle.deactivate()
    torch.testing.assert_close(training.model.weight.grad, wanted, rtol=1e-2, atol=1e-3)
    training.optimizer.step()


def test_optimizers_and_models_can_be_dropped_while_the_handle_stays(
    handle: Handle, collected: Callable[[], None]
) -> None:
    def used() -> list[weakref.ref[Any]]:
        one, other = Training(torch.optim.Adam), Training()
        steps(handle, one, 1.0, 1e30)
        with handle.inference(one.model), torch.no_grad():
            one.model(one.inputs)
        scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 1)
        steps(handle, one, 1.0)
        scheduler.step()
        wrapped = handle.wrap_optimizer(other.optimizer, num_loss=2)
        with wrapped.scale_loss(other.loss()) as scaled:
            scaled.backward()
        return [
            weakref.ref(kept) for kept in (one.model, one.optimizer, one.model.weight, other.optimizer, other.model)
        ]

    references = used()
    collected()
    assert [reference() for reference in references] == [None] * 5
    assert handle.skipped_steps == 1
    # And the losses of optimizers that nobody wrapped can be scaled again.
    steps(handle, Training(), 1.0)


# -- wrong arguments --

LAYER = nn.Linear(2, 2)

# What is called with a handle and a training, and what the error says.
MISUSES: list[tuple[Callable[[Handle, Training], Any], str]] = [
    (lambda handle, one: handle.scale_loss(1.5, one.optimizer).__enter__(), "not a float; pass the loss itself"),  # type: ignore[arg-type]
    (lambda handle, one: handle.scale_loss(None, one.optimizer).__enter__(), "a floating tensor, not None"),  # type: ignore[arg-type]
    (lambda handle, one: handle.scale_loss(torch.tensor(3), one.optimizer).__enter__(), "and this loss is torch.int64"),
    *((lambda handle, one, count=count: setattr(handle, "max_consecutive_skips", count),
       f"max_consecutive_skips={count} must be a whole number of 1 or more") for count in (0, 1.5, True, None)),
    *((lambda handle, one, count=count: handle.wrap_optimizer(one.optimizer, count),
       f"num_loss={count!r} must be a whole number of 1 or more") for count in (0, -1, "2", True)),
    (lambda handle, one: handle.wrap_optimizer(LAYER), "got a Linear"),
    (lambda handle, one: handle.inference([LAYER]).__enter__(), r"inference\(\) takes a torch.nn.Module, not a list"),  # type: ignore[arg-type]
    (lambda handle, one: handle.override([LAYER]), r"override\(\) takes a torch.nn.Module, not a list"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISUSES)
def test_a_wrong_argument_is_told_and_changes_nothing(
    handle: Handle, training: Training, call: Callable[[Handle, Training], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call(handle, training)
    assert not {"step", "scale_loss"} & vars(training.optimizer).keys()
    assert handle.max_consecutive_skips == 50
    steps(handle, training, 1.0)


# -- wrap_optimizer --


def test_wrapping_again_replaces_the_scalers(handle: Handle, training: Training) -> None:
    other = Training()
    handle.wrap_optimizer(training.optimizer, num_loss=3)
    handle.wrap_optimizer(other.optimizer)
    handle.wrap_optimizer(training.optimizer, num_loss=2)
    assert len(handle.stats["loss_scales"]) == 3
    with training.optimizer.scale_loss(training.loss()) as scaled:
        scaled.backward()
    training.optimizer.step()
    assert sorted(handle.state_dict()[f"loss_scaler{number}"]["unskipped"] for number in range(3)) == [0, 0, 1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_a_wrapped_optimizer_is_a_plain_one(handle: Handle, training: Training, copied: Any) -> None:
    twin = copied(handle.wrap_optimizer(training.optimizer))
    assert type(twin) is torch.optim.SGD
    assert not {"step", "scale_loss"} & vars(twin).keys()


# -- inference and casts --


def test_a_step_of_any_optimizer_within_a_module_drops_the_casts(handle: Handle) -> None:
    class Legacy(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            # Tells nobody: `_version` stays what it was.
            for parameter in self.param_groups[0]["params"]:
                parameter.data.zero_()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            first = self.inner(inputs)
            Legacy(self.inner.parameters(), {}).step()
            return first, self.inner(inputs)

    with torch.no_grad():
        first, second = Outer()(torch.ones(3, 4))
    assert first.any()
    assert not second.any()


# -- checkpoints --


def test_a_resumed_run_counts_its_skips_anew(handle: Handle, training: Training) -> None:
    handle.max_consecutive_skips = 2
    state = handle.state_dict()
    steps(handle, training, 1e30)
    with pytest.raises(autoamp.NonFiniteGradientsError):
        steps(handle, training, 1e30)
    training.optimizer.zero_grad()
    handle.load_state_dict(state)
    assert (handle.loss_scale, handle.skipped_steps) == (65536.0, 0)
    steps(handle, training, 1e30)
    assert handle.skipped_steps == 1


class Custom(LossScaler):
    """A scaler of somebody's own: the scale of the number of steps."""

    checks = True  # type: ignore[assignment]

    def update(self, found_inf: bool) -> None:
        self._loss_scale += 1.0


def test_a_scaler_of_ones_own(training: Training) -> None:
    handle = init(loss_scale=Custom(4.0))
    steps(handle, training, 1.0, 1.0)
    assert handle.loss_scale == 6.0


@pytest.mark.parametrize("enabled", [True, False])
def test_copies_are_the_handle_itself_and_pickles_are_refused(enabled: bool) -> None:
    handle = autoamp.init(enabled, dtype=torch.float16, device_type="cpu")
    training = {"model": nn.Linear(2, 2), "handle": handle}
    assert copy.deepcopy(training)["handle"] is handle
    assert copy.copy(handle) is handle
    assert handle.is_active() is enabled
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(autoamp.UsageError, match=r"a handle cannot be pickled.*state_dict\(\)"):
            pickle.dumps(training, protocol)


def test_repr_tells_dtype_device_lists_scale_skips_and_whether_it_is_active() -> None:
    handle = autoamp.init(dtype=torch.float16, device_type="cpu", lists="apex", loss_scale=128.0)
    assert repr(handle) == (
        "<autoamp.Handle active: torch.float16 on cpu, lists=['lists/apex.toml', 'lists/default.toml'], "
        "loss_scale=128, skipped_steps=0>"
    )
    handle.deactivate()
    assert repr(handle).startswith("<autoamp.Handle not active: ")
    assert "not active" in repr(autoamp.init(False))


def test_repr_tells_the_level_each_scale_and_the_skips() -> None:
    training = Training()
    model, optimizer = training.model, training.optimizer
    autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, device_type="cpu", num_losses=2)
    with autoamp.scale_loss(training.loss(float("inf")), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = repr(autoamp.current_handle())
    assert "active: opt_level='O2', torch.float16 on cpu" in found
    assert "loss_scale=65536, 32768, skipped_steps=1>" in found


# -- disabled --


def test_disabled_nothing_happens(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    handle = autoamp.init(enabled=False)
    assert isinstance(handle, autoamp.NoOpHandle)
    assert not isinstance(handle, autoamp.Handle)
    assert autoamp.current_handle() is None
    loss = training.loss()
    assert loss.dtype is torch.float32
    before = dict(vars(optimizer))
    with handle.scale_loss(loss, optimizer, 3, delay_unscale=True) as scaled:
        assert scaled is loss
        scaled.backward()
    assert vars(optimizer) == before
    optimizer.step()
    with handle.disable_casts(), handle.inference(model) as same, handle.override(model, "fp32"):
        assert same is model
        assert model(training.inputs).dtype is torch.float32
    handle.cache.clear()
    assert len(handle.cache) == 0
    assert (handle.loss_scale, handle.skipped_steps, handle.last_step_skipped) == (1.0, 0, False)
    assert (handle.late_bound, handle.skipped_rules, handle.deactivate()) == ((), (), ())
    assert not handle.is_active()
    assert not handle.backend.kernels
    assert not handle.auto_scale().active
    handle.sync_over(None)
    handle.masters_from_model()
    handle.max_consecutive_skips = 3
    assert autoamp.NoOpHandle().max_consecutive_skips == init().max_consecutive_skips
    handle.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    assert handle.state_dict() == {}


def test_disabled_a_wrapped_optimizer_scales_nothing(training: Training) -> None:
    handle = autoamp.init(enabled=False)
    optimizer = handle.wrap_optimizer(training.optimizer, num_loss=2)
    assert optimizer is training.optimizer
    loss = training.loss()
    with optimizer.scale_loss(loss) as first, optimizer.scale_loss(loss, delay_unscale=True) as second:
        assert first is second is loss
    loss.backward()
    assert handle.clip_grad_norm_(optimizer, 1e-3) > 1e-3
    assert torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters()]) < 1.1e-3  # type: ignore[misc]
    assert optimizer.step() is None


def test_disabled_diagnostics_find_nothing_and_followers_step(training: Training) -> None:
    handle = autoamp.init(enabled=False)
    with handle.record(), handle.trace() as trace, handle.profile_ranges() as ranges, handle.count() as counts:
        loss = training.loss()
        loss.backward()
    assert (trace.rows, counts.ops) == ((), {})
    assert any(row["op"] == "aten::addmm" for row in ranges.to_dict()["ops"])
    assert handle.explain("softmax").rules == ()
    assert handle.explain_overflow(training.loss) is None
    assert handle.report("unused.html") == {}
    assert handle.stats == {**init().stats, "casts": {}, "loss_scale": 1.0, "loss_scales": [], "found_inf": []}
    handle = autoamp.init(enabled=False)
    assert (handle.overflows, handle.postfix()) == ((), {"scale": "1", "skipped": "0"})
    handle.log_to(None)()
    stepped: list[int] = []
    end = handle.follow(lambda: stepped.append(1))
    training.optimizer.step()
    end()
    training.optimizer.step()
    assert stepped == [1]


def test_followers_of_a_disabled_handle_end_with_it(training: Training) -> None:
    stepped: list[str] = []
    autoamp.init(enabled=False).follow(lambda: stepped.append("disabled"))
    handle = init()
    handle.follow(lambda: stepped.append("enabled"))
    handle.wrap_optimizer(training.optimizer)
    training.loss().backward()
    training.optimizer.step()
    assert stepped == ["enabled"]


def test_followers_of_a_disabled_region_end_with_it(training: Training) -> None:
    stepped: list[str] = []
    with autoamp.region(enabled=False) as handle:
        handle.follow(lambda: stepped.append("in the region"))
        training.optimizer.step()
    training.optimizer.step()
    assert stepped == ["in the region"]
    with autoamp.region(enabled=False) as handle:
        handle.follow(lambda: stepped.append("again"))
        training.optimizer.step()
    assert stepped == ["in the region", "again"]


def test_a_norm_type_that_is_none_is_refused_before_gradients_change(training: Training) -> None:
    handle = init()
    training.loss().backward()
    before = [parameter.grad.clone() for parameter in training.model.parameters() if parameter.grad is not None]
    with pytest.raises(autoamp.UsageError, match=r"norm_type=0\.0 must be above 0"):
        handle.clip_grad_norm_(training.optimizer, 1.0, norm_type=0.0)
    after = [parameter.grad for parameter in training.model.parameters()]
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


def test_what_is_told_at_the_end_may_be_an_error(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    original, handle = torch.nn.functional.linear, init()
    steps(handle, training, 1.0)
    handle.override(training.model, "fp32")

    def catch_up() -> None:
        raise UserWarning("the last steps had inf")

    # As where a filter makes an error of a warning about steps that only the device knew.
    monkeypatch.setattr(runtime_of(handle).nonfinite, "catch_up", catch_up)
    with pytest.raises(UserWarning, match="the last steps"):
        handle.deactivate()
    assert torch.nn.functional.linear is original
    assert not handle.is_active()
    assert "step" not in vars(training.optimizer)
    assert vars(training.model).keys() == vars(Training().model).keys()
