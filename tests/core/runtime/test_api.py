"""`init()` and the functions that act on whichever handle is active."""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch.nn.functional as F

import autoamp
from autoamp.core import Handle
from tests.core.runtime.shared import BF16, FULL, HALF, LISTS, Training, in_thread, init, ones, patched, region, runs_in

# -- init --


@pytest.mark.parametrize("enabled", [False, 0, None, numpy.bool_(False)])
def test_disabled_gives_a_handle_that_does_nothing_and_takes_patches_away(enabled: Any) -> None:
    first = init()
    assert isinstance(autoamp.init(enabled), autoamp.NoOpHandle)
    assert not first.is_active()
    assert not patched()
    assert autoamp.current_handle() is None


def test_the_same_arguments_give_the_same_handle() -> None:
    handle = init()
    assert init() is handle
    assert init(loss_scale=None, rebind=False, lists=dict(LISTS)) is handle
    assert handle.is_active()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": BF16},
        {"loss_scale": 128.0},
        {"enable_caching": False},
        {"allow_banned": False},
        {"rebind": True},
        {"verbose": True},
        {"lists": {**LISTS, "fp32": ["linear"], "fp16": []}},
    ],
)
def test_other_arguments_replace_the_handle(changes: dict[str, Any]) -> None:
    first = init()
    second = init(**changes)
    assert not first.is_active()
    assert autoamp.current_handle() is second is init(**changes)


def test_a_handle_that_is_replaced_lets_go_of_modules_and_optimizers() -> None:
    training, first = Training(), init()
    own = vars(training.model).keys()
    first.override(training.model, "fp32")
    with first.scale_loss(training.loss(float("inf")), training.optimizer) as scaled:
        scaled.backward()
    init(dtype=BF16)
    assert vars(training.model).keys() == own
    assert "step" not in vars(training.optimizer)


def test_an_edited_list_file_is_picked_up(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\nextends = []\nfp16 = ["linear"]\n')
    first = init(lists=str(path))
    assert runs_in() is HALF
    assert init(lists=str(path)) is first
    path.write_text('schema = 1\nextends = []\nfp32 = ["linear"]\n')
    assert init(lists=str(path)) is not first
    assert F.linear(ones(HALF), ones(HALF)).dtype is FULL


def test_threads_that_call_init_at_once_get_one_handle() -> None:
    barrier = threading.Barrier(4)

    def call() -> Handle:
        barrier.wait(30)
        return init()

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call) for _ in range(4)]
    assert {one.result() for one in calls} == {autoamp.current_handle()}
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


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoamp.init(device_type="cpu", dtype=HALF).deactivate()
        with region():
            pass


def test_verbose_logs_once_where_the_program_sets_logging_up_later(capsys: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("autoamp")
    before = root.handlers[:], ours.handlers[:], ours.level
    root.handlers, ours.handlers = [], []
    try:
        init(verbose=True).deactivate()
        assert capsys.readouterr().err.count("targets patched") == 1
        root.addHandler(logging.StreamHandler())
        init(verbose=True).deactivate()
        assert capsys.readouterr().err.count("targets patched") == 1
    finally:
        root.handlers, ours.handlers, ours.level = before
