"""What the arguments of `init()` become, and which of them are refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

import autoamp
from autoamp.core import DynamicLossScaler, Handle
from autoamp.errors import AutoampError
from tests.core.runtime.shared import HALF, Training, init, runs_in, steps


def test_defaults_are_those_of_torch() -> None:
    handle = autoamp.init(device_type="cpu")
    assert isinstance(handle, Handle)
    assert handle.settings.dtype is torch.get_autocast_dtype("cpu")
    assert handle.loss_scale == 1.0


@pytest.mark.parametrize(
    ("loss_scale", "scale", "after_overflow"),
    [(None, 65536.0, 32768.0), ("dynamic", 65536.0, 32768.0), (128, 128.0, 128.0), (1.0, 1.0, 1.0)],
)
def test_loss_scale_may_be_given_in_many_ways(
    loss_scale: Any, scale: float, after_overflow: float, training: Training
) -> None:
    handle = init(loss_scale=loss_scale)
    assert handle.loss_scale == scale
    assert isinstance(handle.loss_scale, float)
    # A scale of 1 skips no step, and the step is taken with a warning.
    warns = pytest.warns(UserWarning, match="has inf or nan in the gradients")
    with warns if scale == 1 else contextlib.nullcontext():
        steps(handle, training, math.inf)
    assert handle.loss_scale == after_overflow


def test_a_scaler_may_be_given(training: Training) -> None:
    scaler = DynamicLossScaler(init_scale=8.0, growth_interval=1)
    handle = init(loss_scale=scaler)
    assert init(loss_scale=scaler) is handle
    steps(handle, training, 1.0)
    assert handle.loss_scale == scaler.loss_scale == 16.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": "dynamc"}, "loss_scale='dynamc' is a string; choose 'dynamic'"),
        ({"loss_scale": 0}, r"loss_scale=0 must be from 2"),
        ({"loss_scale": float("nan")}, "loss_scale=nan must be from 2"),
        ({"loss_scale": True}, "loss_scale=True is not a number"),
        ({"loss_scale": [1]}, r"loss_scale=\[1\] is not a number"),
        ({"lists": "no_such_set"}, "'no_such_set' is unknown"),
        ({"dtype": torch.float32}, "dtype=torch.float32 is not a half-precision dtype; choose torch.float16 or torch"),
        ({"device_type": "gpu"}, "device_type='gpu' is unknown to torch; choose 'cuda', 'cpu'"),
        ({"device_type": 3.5}, "device_type=3.5 is unknown to torch; choose 'cuda', 'cpu'"),
        ({"device_type": "meta", "dtype": None}, "no default half dtype for device_type='meta'; give dtype="),
    ],
)
def test_a_wrong_argument_is_told_and_changes_nothing(settings: dict[str, Any], message: str) -> None:
    before = init()
    with pytest.raises(AutoampError, match=message):
        init(**settings)
    assert autoamp.current_handle() is before
    assert before.is_active()
    assert runs_in() is HALF
