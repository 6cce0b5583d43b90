"""`region()`: which handle serves it, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoamp
from autoamp.core import Handle, NoOpHandle
from autoamp.errors import ListFileError, UsageError
from tests.core.runtime.shared import FULL, HALF, Training, in_thread, init, ones, patched, region, runs_in, steps


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


def test_a_region_with_the_scope_of_modules_casts_within_modules_alone() -> None:
    layer = nn.Linear(2, 2)
    seen: list[torch.dtype] = []
    layer.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    with region(scope="modules"):
        assert runs_in() is FULL
        assert layer(ones()).dtype is FULL
    assert seen == [HALF]


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


def test_a_region_without_settings_or_with_the_same_is_served_by_the_active_handle() -> None:
    handle = init()
    for block in (autoamp.region(), region()):
        with block as serving:
            assert serving is handle
            assert runs_in() is HALF
        assert handle.is_active()
    with autoamp.disable_casts():
        assert runs_in() is FULL
        with autoamp.region():
            assert runs_in() is HALF
        assert runs_in() is FULL


def test_training_within_a_region() -> None:
    training = Training()
    before = training.model.weight.detach().clone()
    with region(loss_scale=8.0) as handle:
        steps(handle, training, 1.0)
    assert not torch.equal(training.model.weight, before)
    with pytest.raises(UsageError, match="not active"):
        steps(handle, training, 1.0)


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
