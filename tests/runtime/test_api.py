"""The runtime: one handle for the process, regions above it, and the functions that act on whichever is active."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.errors import ListFileError, UsageError
from autoamp.patching.marks import original_of
from autoamp.runtime.active import needed_handle
from autoamp.runtime.handle import Handle
from autoamp.runtime.no_op import NoOpHandle
from autoamp.scaling.loss_scale import StaticLossScaler

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
LISTS: dict[str, Any] = {"extends": [], "fp16": ["linear", "matmul"], "fp32": ["softmax", "exp"]}
SETTINGS: dict[str, Any] = {"lists": LISTS, "device_type": "cpu", "dtype": HALF}


def init(**changes: Any) -> Any:
    return autoamp.init(**{**SETTINGS, **changes})


def region(**changes: Any) -> autoamp.Region:
    return autoamp.region(**{**SETTINGS, **changes})


def ones() -> Tensor:
    return torch.ones(2, 2)


def runs_in() -> torch.dtype:
    """The dtype that a listed op runs in, here and now."""
    return F.linear(ones(), ones()).dtype


def patched() -> bool:
    return original_of(F.linear) is not F.linear


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, and return what it returned or raise what it raised."""
    result: list[Any] = []

    def target() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert result, "the thread did not end"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


# -- init --


def test_init_patches_and_deactivate_restores() -> None:
    handle = init()
    assert isinstance(handle, Handle)
    assert handle.is_active()
    assert autoamp.current_handle() is handle
    assert runs_in() is HALF
    handle.deactivate()
    assert not handle.is_active()
    assert autoamp.current_handle() is None
    assert not patched()
    assert handle.deactivate() == ()


def test_the_same_arguments_give_the_same_handle() -> None:
    handle = init()
    assert init() is handle
    assert init(loss_scale=None, rebind=True, lists=dict(LISTS)) is handle
    assert handle.is_active()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": BF16},
        {"loss_scale": 128.0},
        {"enable_caching": False},
        {"allow_banned": False},
        {"rebind": False},
        {"verbose": True},
        {"lists": {**LISTS, "fp32": ["linear"], "fp16": []}},
    ],
)
def test_other_arguments_replace_the_handle(changes: dict[str, Any]) -> None:
    first = init()
    second = init(**changes)
    assert second is not first
    assert not first.is_active()
    assert second.is_active()
    assert autoamp.current_handle() is second
    assert init(**changes) is second


def test_a_handle_that_is_replaced_lets_go_of_modules_and_optimizers() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = dict(vars(model)), model.weight.detach().clone()
    first = init()
    first.override(model, "fp32")
    with first.scale_loss(model(ones()).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    init(dtype=BF16)
    assert vars(model).keys() == before[0].keys()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(model.weight, before[1] - 1.0)


def test_after_deactivation_the_same_arguments_give_a_new_handle() -> None:
    first = init()
    first.deactivate()
    second = init()
    assert second is not first
    assert second.is_active()
    assert not first.is_active()


def test_an_edited_list_file_is_picked_up(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\nextends = []\nfp16 = ["linear"]\n')
    first = init(lists=str(path))
    assert runs_in() is HALF
    assert init(lists=str(path)) is first
    path.write_text('schema = 1\nextends = []\nfp32 = ["linear"]\n')
    second = init(lists=str(path))
    assert second is not first
    assert runs_in() is FULL
    assert F.linear(ones().half(), ones().half()).dtype is FULL


def test_a_wrong_list_file_leaves_the_handle_active(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\nfp32 = ["softmaxx"]\n')
    first = init()
    with pytest.raises(ListFileError, match=r"mine\.toml:2: unknown op 'softmaxx'.*'softmax'"):
        init(lists=str(path))
    assert autoamp.current_handle() is first
    assert runs_in() is HALF


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": torch.float64}, UsageError, r"choose torch\.float16 or torch\.bfloat16"),
        ({"loss_scale": -1.0}, ValueError, "-1"),
        ({"lists": "no_such_set"}, ListFileError, "'no_such_set' is unknown"),
    ],
)
def test_wrong_arguments_are_told_and_change_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    first = init()
    with pytest.raises(error, match=message):
        init(**arguments)
    assert autoamp.current_handle() is first
    assert runs_in() is HALF


def test_disabled_gives_a_handle_that_does_nothing_and_takes_patches_away() -> None:
    first = init()
    handle = autoamp.init(False)
    assert isinstance(handle, NoOpHandle)
    assert not first.is_active()
    assert not patched()
    assert autoamp.current_handle() is None


def test_defaults_are_those_of_torch() -> None:
    handle = autoamp.init(device_type="cpu")
    assert isinstance(handle, Handle)
    assert handle.settings.dtype is torch.get_autocast_dtype("cpu")
    assert handle.loss_scale == 1.0


def test_verbose_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("autoamp")
    level, handlers = logger.level, list(logger.handlers)
    try:
        init(verbose=True)
        assert "targets patched" in caplog.text
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_threads_that_call_init_at_once_get_one_handle() -> None:
    barrier, handles = threading.Barrier(4), []

    def call() -> None:
        barrier.wait(30)
        handles.append(init())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(handles) == 4
    assert set(map(id, handles)) == {id(autoamp.current_handle())}
    assert in_thread(runs_in) is HALF


# -- disable_casts --


def test_disable_casts_without_a_handle_does_nothing() -> None:
    with autoamp.disable_casts():
        assert runs_in() is FULL


def test_disable_casts_holds_for_this_thread_and_ends_after_an_exception() -> None:
    init()
    with pytest.raises(KeyError), autoamp.disable_casts():  # noqa: PT012
        assert runs_in() is FULL
        assert in_thread(runs_in) is HALF
        with autoamp.disable_casts():
            pass
        assert runs_in() is FULL
        raise KeyError
    assert runs_in() is HALF


# -- regions --


def test_a_region_patches_for_the_block_alone_on_its_thread() -> None:
    with region() as handle:
        assert isinstance(handle, Handle)
        assert runs_in() is HALF
        assert patched()
        assert in_thread(runs_in) is FULL
        assert autoamp.current_handle() is handle
    assert not patched()
    assert not handle.is_active()
    assert autoamp.current_handle() is None


def test_a_region_ends_after_an_exception() -> None:
    with pytest.raises(KeyError), region():
        raise KeyError
    assert not patched()


def test_a_region_that_cannot_be_entered_changes_nothing() -> None:
    first = init()
    wrong = region(lists={"extends": [], "fp32": ["softmaxx"]})
    for _ in range(2):
        with pytest.raises(ListFileError), wrong:
            pytest.fail("the region was entered")
    assert autoamp.current_handle() is first
    assert runs_in() is HALF


def test_a_region_that_is_used_again_keeps_its_handle_and_loss_scale() -> None:
    block = region(loss_scale=64.0)
    with block as first:
        first.load_state_dict({**first.state_dict(), "loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}})
        with block as again:
            assert again is first
            assert runs_in() is HALF
        assert runs_in() is HALF
    with block as second:
        assert second is first
        assert second.state_dict()["loss_scaler0"]["unskipped"] == 5
        assert runs_in() is HALF
    assert not patched()


def test_a_region_without_settings_is_served_by_the_active_handle() -> None:
    handle = init()
    with autoamp.region() as serving:
        assert serving is handle
        assert runs_in() is HALF
    assert handle.is_active()
    with autoamp.disable_casts():
        assert runs_in() is FULL
        with autoamp.region():
            assert runs_in() is HALF
        assert runs_in() is FULL


def test_a_region_with_the_same_settings_is_served_by_the_active_handle() -> None:
    handle = init()
    with region() as serving:
        assert serving is handle
    assert handle.is_active()


def test_a_region_with_other_settings_suspends_the_handle_and_brings_it_back() -> None:
    handle = init()
    with pytest.raises(KeyError), region(dtype=BF16) as inner:  # noqa: PT012
        assert inner is not handle
        assert not handle.is_active()
        assert runs_in() is BF16
        # Other threads ran in half precision by the handle that is suspended; by the region's they do not.
        assert in_thread(runs_in) is FULL
        with region(dtype=HALF, enable_caching=False) as innermost:
            assert runs_in() is HALF
            assert autoamp.current_handle() is innermost
        assert runs_in() is BF16
        raise KeyError
    assert autoamp.current_handle() is handle
    assert runs_in() is HALF
    assert in_thread(runs_in) is HALF


def test_a_skip_that_is_due_survives_a_region_with_other_settings() -> None:
    handle = init()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    with handle.scale_loss(model(ones()).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    with region(dtype=BF16):
        assert runs_in() is BF16
    optimizer.step()
    assert handle.last_step_skipped
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    with handle.scale_loss(model(ones()).sum() * 1e-3, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not handle.last_step_skipped
    assert not torch.equal(model.weight, before)


def test_training_within_a_region() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    block = region(loss_scale=8.0)
    with block as handle:
        with handle.scale_loss(model(ones()).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.1 * 2.0, atol=1e-3)
    with pytest.raises(UsageError, match="not active"), handle.scale_loss(model(ones()).sum(), optimizer):
        pytest.fail("a handle that is not active scales no loss")


def test_a_disabled_region() -> None:
    with autoamp.region(enabled=False) as handle:
        assert isinstance(handle, NoOpHandle)
        assert runs_in() is FULL
    active = init()
    with autoamp.region(enabled=False) as handle:
        assert handle is active
        assert runs_in() is FULL
        assert in_thread(runs_in) is HALF
        with autoamp.region():
            assert runs_in() is HALF
    assert runs_in() is HALF


def test_an_unknown_argument_is_told_at_once() -> None:
    with pytest.raises(TypeError, match="dtpye"):
        autoamp.region(dtpye=HALF)


def test_a_handle_that_was_deactivated_does_not_come_back_with_a_region() -> None:
    handle = init()
    handle.deactivate()
    with region(dtype=BF16):
        pass
    assert not handle.is_active()
    assert not patched()


def test_a_handle_may_be_deactivated_within_its_region() -> None:
    with region() as handle:
        handle.deactivate()
        assert runs_in() is FULL
        with region(dtype=BF16):
            assert runs_in() is BF16
        assert runs_in() is FULL
    assert not patched()


# -- regions and threads --


class Meeting:
    """Two threads that take turns: each waits for the other's word."""

    def __init__(self) -> None:
        self.events = {name: threading.Event() for name in ("second is in", "first is out")}

    def tell(self, name: str) -> None:
        self.events[name].set()

    def wait(self, name: str) -> None:
        assert self.events[name].wait(30), name


@pytest.mark.parametrize("block", ["one region", "two regions of the same settings"])
def test_two_threads_share_a_region_and_the_last_one_out_restores(block: str) -> None:
    first, meeting = region(), Meeting()
    second = first if block == "one region" else region()
    outcome: list[Any] = []

    def other() -> None:
        with second:
            outcome.append(runs_in())
            meeting.tell("second is in")
            meeting.wait("first is out")
            outcome.append(runs_in())
        outcome.append(patched())

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        meeting.wait("second is in")
        assert runs_in() is HALF
    assert runs_in() is FULL
    meeting.tell("first is out")
    thread.join(30)
    assert outcome == [HALF, HALF, False]


def test_regions_of_other_settings_in_two_threads_at_once_are_refused() -> None:
    def other() -> None:
        with region(dtype=BF16):
            pytest.fail("the region was entered")

    with region():
        with pytest.raises(UsageError, match="open in another thread"):
            in_thread(other)
        assert runs_in() is HALF
    assert not patched()
    with region(dtype=BF16):
        assert runs_in() is BF16


def test_the_handle_before_comes_back_when_the_last_thread_leaves() -> None:
    handle, block, meeting = init(), region(dtype=BF16), Meeting()

    def other() -> None:
        with block:
            meeting.tell("second is in")
            meeting.wait("first is out")

    thread = threading.Thread(target=other)
    with block as inner:
        thread.start()
        meeting.wait("second is in")
    assert autoamp.current_handle() is inner
    assert runs_in() is FULL
    meeting.tell("first is out")
    thread.join(30)
    assert autoamp.current_handle() is handle
    assert runs_in() is HALF


def test_init_within_a_region_of_its_own_handle_is_refused() -> None:
    with region() as handle:
        for call in (init, lambda: init(dtype=BF16), lambda: autoamp.init(False), lambda: in_thread(init)):
            with pytest.raises(UsageError, match="while a region is open"):
                call()
        assert autoamp.current_handle() is handle
        assert runs_in() is HALF
    assert not patched()


def test_init_within_a_region_that_the_base_serves_is_allowed() -> None:
    init()
    with autoamp.region():
        second = init(dtype=BF16)
        assert runs_in() is BF16
    assert autoamp.current_handle() is second
    assert runs_in() is BF16


def test_regions_in_threads_while_others_call() -> None:
    block, problems = region(), []

    def work() -> None:
        try:
            for _ in range(5):
                if runs_in() is not FULL:
                    problems.append("cast outside of the region")
                with block:
                    if runs_in() is not HALF:
                        problems.append("not cast within the region")
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert not patched()


# -- what is exported --


def test_the_loss_scaler_may_be_an_object() -> None:
    scaler = StaticLossScaler(32.0)
    handle = init(loss_scale=scaler)
    assert handle.loss_scale == 32.0
    assert init(loss_scale=scaler) is handle


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoamp.init(device_type="cpu", dtype=HALF).deactivate()
        with region():
            pass


def test_a_handle_that_is_deactivated_within_a_region_stays_so() -> None:
    outer = autoamp.init(device_type="cpu", dtype=torch.float16)
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
        outer.deactivate()
    assert not outer.is_active()
    assert autoamp.current_handle() is None
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


# -- what scales losses --


def test_the_needed_handle_is_the_active_one_or_the_one_that_does_nothing() -> None:
    with pytest.raises(UsageError, match=r"anything\(\) needs a handle; call autoamp.initialize\(model, optimizer\)"):
        needed_handle("anything")
    nothing = autoamp.init(enabled=False)
    assert needed_handle("anything") is nothing
    assert autoamp.current_handle() is None
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16) as inner:
        assert needed_handle("anything") is inner
    assert needed_handle("anything") is nothing
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    assert needed_handle("anything") is handle
    handle.deactivate()
    with pytest.raises(UsageError, match="needs a handle"):
        needed_handle("anything")
