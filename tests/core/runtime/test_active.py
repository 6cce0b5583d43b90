"""Which handle is active: regions above the base handle, one after another and in threads; and who is told of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.core import Handle, activated, suspended
from autoamp.errors import UsageError
from tests.core.runtime.shared import BF16, FULL, HALF, Training, in_thread, init, patched, region, runs_in, steps


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
    handle, training = init(), Training()
    before = training.model.weight.detach().clone()
    with handle.scale_loss(training.loss(float("inf")), training.optimizer) as scaled:
        scaled.backward()
    with region(dtype=BF16):
        assert runs_in() is BF16
    training.optimizer.step()
    assert handle.last_step_skipped
    assert torch.equal(training.model.weight, before)
    training.optimizer.zero_grad()
    steps(handle, training, 1.0)
    assert not handle.last_step_skipped


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_handle_that_was_deactivated_does_not_come_back_with_a_region(when: str) -> None:
    handle = init()
    if when == "before":
        handle.deactivate()
    with region(dtype=BF16):
        handle.deactivate()
    assert not handle.is_active()
    assert not patched()


def overlapping(first: autoamp.Region, second: autoamp.Region) -> list[Any]:
    """Enter two regions in two threads and leave the first one earlier; return what the second thread saw."""
    barrier, seen = threading.Barrier(2), []

    def other() -> None:
        with second:
            seen.append(runs_in())
            barrier.wait(30)
            barrier.wait(30)
            seen.append(runs_in())
        seen.append(patched())

    with ThreadPoolExecutor(1) as pool:
        with first:
            ended = pool.submit(other)
            barrier.wait(30)
            seen.append(runs_in())
        seen.append(runs_in())
        seen.append(autoamp.current_handle())
        barrier.wait(30)
        ended.result(30)
    return seen


@pytest.mark.parametrize("block", ["one region", "two regions of the same settings"])
def test_two_threads_share_a_region_and_the_last_one_out_restores(block: str) -> None:
    first = region()
    seen = overlapping(first, first if block == "one region" else region())
    assert [*seen[:3], *seen[4:]] == [HALF, HALF, FULL, HALF, False]


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


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss_scale": None}, {"loss_scale": 128.0}, {"scope": "global"}, {"allow_banned": True}],
    ids=str,
)
def test_a_region_on_another_thread_casts_there_alone_by_the_handle_of_the_program(changes: dict[str, Any]) -> None:
    handle, training = init(loss_scale=128.0), Training()
    entered, done = threading.Event(), threading.Event()

    def other() -> torch.dtype:
        with autoamp.disable_casts(), region(**changes) as serving:
            entered.set()
            assert done.wait(30)
            assert serving is handle
            return runs_in()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(other)
        assert entered.wait(30)
        with autoamp.disable_casts():
            assert runs_in() is FULL
        assert handle.is_active()
        assert runs_in() is HALF
        steps(handle, training, 1.0)
        done.set()
        assert ended.result(30) is HALF
    assert autoamp.current_handle() is handle


def test_a_region_of_everything_on_another_thread_goes_over_the_scope_of_modules() -> None:
    handle = init(scope="modules")

    def other() -> tuple[Any, torch.dtype]:
        with region() as serving:
            return serving, runs_in()

    assert in_thread(other) == (handle, HALF)
    assert runs_in() is FULL


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": BF16},
        {"lists": {"extends": [], "fp16": ["linear"]}},
        {"loss_scale": 64.0},
        {"scope": "modules"},
        {"enable_caching": False},
    ],
    ids=str,
)
def test_a_region_on_another_thread_that_asks_for_other_settings_than_the_handle_is_refused(
    changes: dict[str, Any],
) -> None:
    handle = init(loss_scale=128.0)

    def other() -> None:
        with region(**changes):
            pytest.fail("the region was entered")

    with pytest.raises(UsageError, match=r"init\(\) was called in another thread.*dtype=torch.float16"):
        in_thread(other)
    assert handle.is_active()
    assert runs_in() is HALF
    # On the thread of the handle it suspends that, as ever.
    with region(**changes) as inner:
        assert inner is not handle


def test_a_region_has_settings_of_its_own_once_the_thread_of_the_handle_has_ended() -> None:
    handle = in_thread(init)
    with region(dtype=BF16) as inner:
        assert inner is not handle
        assert runs_in() is BF16


def test_init_within_a_region_of_its_own_handle_is_refused() -> None:
    with region() as handle:
        model = nn.Linear(2, 2)
        others = (lambda: init(dtype=BF16), lambda: autoamp.init(False), lambda: autoamp.initialize(model, verbosity=0))
        for call in (init, lambda: in_thread(init), *others):
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
    block = region()

    def work() -> None:
        for _ in range(5):
            assert runs_in() is FULL
            with block:
                assert runs_in() is HALF

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(work) for _ in range(4)]
    assert [one.result() for one in calls] == [None] * 4
    assert not patched()


def test_what_needs_a_handle_takes_the_active_one_or_the_one_that_does_nothing() -> None:
    autoamp.init(enabled=False)
    assert autoamp.state_dict() == {}
    with region(loss_scale=8.0):
        assert autoamp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
    assert autoamp.state_dict() == {}
    handle = init(loss_scale=4.0)
    assert autoamp.state_dict() == handle.state_dict()
    with autoamp.scale_loss(torch.ones((), requires_grad=True), []) as scaled:
        assert scaled.item() == 4.0


# -- who is told of it --


def test_handles_are_told_of_as_they_come_and_go() -> None:
    heard: list[tuple[str, Handle | None]] = []

    def note_activated(handle: Handle) -> None:
        assert handle is autoamp.current_handle()
        heard.append(("activated", handle))

    def note_suspended() -> None:
        # The patches are in place still.
        heard.append(("suspended", autoamp.current_handle()))

    activated.append(note_activated)
    suspended.append(note_suspended)
    try:
        one = init()
        assert init() is one
        with region(dtype=BF16) as inner:
            pass
        autoamp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        last = autoamp.current_handle()
        assert last is not None
        # Patches that are installed anew are the same handle's.
        last.count().stop()
        last.deactivate()
        last.deactivate()
    finally:
        activated.remove(note_activated)
        suspended.remove(note_suspended)
    expected = [(event, handle) for handle in (one, inner, one, last) for event in ("activated", "suspended")]
    assert heard == expected


def test_a_listener_that_fails_leaves_the_handle_before() -> None:
    one = init()
    decorated = autoamp.half_function(lambda x: x.dtype)

    def refuse(handle: Handle) -> None:
        if handle is not one:
            raise ValueError("not this one")

    activated.append(refuse)
    try:
        with pytest.raises(ValueError, match="not this one"):
            init(dtype=BF16)
    finally:
        activated.remove(refuse)
    assert autoamp.current_handle() is one
    assert one.is_active()
    assert decorated(torch.ones(1)) is torch.float16
