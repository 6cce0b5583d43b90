"""Mistakes of a program: scaled gradients clipped, steps repeated, gradients underflowing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.stepping.setting_warnings import UnderflowWatch


@pytest.mark.parametrize(
    ("grads", "told"),
    [
        ([0.0, 0.0], "100%"),
        ([1e-7, 0.0], "100%"),
        ([1e-6, 1e-6, 1.0], "67%"),
        # Most of what is not 0 is held.
        ([1e-6, 1.0, 1.0], None),
        ([0.0, 0.0, 0.0, 1.0], None),
        # That is no underflow.
        ([float("inf"), float("nan")], None),
        ([], None),
    ],
)
def test_gradients_that_underflow_in_fp16_warn_once(grads: list[float], told: str | None) -> None:
    param = torch.ones(len(grads), requires_grad=True)
    param.grad = torch.tensor(grads)
    optimizer, vanishing = torch.optim.SGD([param], lr=0.1), UnderflowWatch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            vanishing.look(optimizer, [param, torch.ones(1)])
    assert [str(one.message).split()[0] for one in caught] == ([] if told is None else [told])


@pytest.mark.parametrize(("at", "warns"), [(1, 1), (2, 0), (9, 0), (10, 1), (99, 0), (100, 1), (999, 0), (1000, 1)])
def test_underflow_is_checked_at_some_steps(at: int, warns: int) -> None:
    param = torch.ones(1, requires_grad=True)
    optimizer, vanishing = torch.optim.SGD([param], lr=0.1), UnderflowWatch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, at + 2):
            param.grad = torch.full((1,), float(step != at))
            vanishing.look(optimizer, [param])
    assert len(caught) == warns


# -- what a program does --

Setup = tuple[torch.nn.Module, torch.optim.Optimizer, autoamp.Handle]


def begun(opt_level: str | None = None, *, fused: bool = False, **options: Any) -> Setup:
    """Return a model, its optimizer and a handle in fp16."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    options = {"device_type": "cpu", "dtype": torch.float16, **options}
    if opt_level is None:
        handle = autoamp.init(**options)
    else:
        model, optimizer = autoamp.initialize(model, optimizer, opt_level=opt_level, **options)
        handle = autoamp.current_handle()
    assert isinstance(handle, autoamp.Handle)
    return model, optimizer, handle


def loss_of(model: torch.nn.Module) -> Tensor:
    return model(torch.ones(2, 4)).float().sum() / 8


@pytest.mark.parametrize("opt_level", [None, "O2"])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_of_scaled_gradients_warns_once_at_the_line(name: str, opt_level: str | None) -> None:
    model, optimizer, handle = begun(opt_level, loss_scale=128.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with handle.scale_loss(loss_of(model), optimizer) as scaled:
                scaled.backward()
                getattr(torch.nn.utils, name)((param for param in model.parameters()), 1.0)
    (told,) = caught
    assert f"{name} was called inside the scale_loss block of Adam" in str(told.message)
    assert "after the with block" in str(told.message)
    assert told.filename == __file__
    # It clips all the same.
    assert all(param.grad is not None and float(param.grad.abs().max()) <= 1 / 128 for param in model.parameters())


def test_clipping_of_gradients_whose_unscaling_is_delayed_warns() -> None:
    model, optimizer, handle = begun(loss_scale=128.0)
    with handle.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.warns(UserWarning, match="after one with delay_unscale=True"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_clipping_of_true_gradients_does_not_warn() -> None:
    model, optimizer, handle = begun(loss_scale=128.0)
    other = torch.nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with handle.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            # Another optimizer's, which are not scaled.
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model, optimizer, handle = begun(loss_scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with handle.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("opt_level", [None, "O1", "O2"])
def test_a_second_step_after_a_skipped_one_is_skipped_too(opt_level: str | None, fused: bool) -> None:
    model, optimizer, handle = begun(opt_level, fused=fused, loss_scale=None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with handle.scale_loss(loss_of(model) * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    scale = handle.loss_scale
    for _ in range(3):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert handle.loss_scale == scale
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
