"""Warnings of settings with which training would silently go wrong, and of mistakes of a program."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import optimizers
from autoamp.core.steps import UnderflowWatch

LISTS = {"extends": [], "fp16": ["linear"], "fp32": []}


def initialize(model: Any, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"dtype": torch.float16, "device_type": "cpu", "verbosity": 0, "lists": LISTS}
    return autoamp.initialize(model, optimizers, **{**defaults, **kwargs})


def messages(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def linear(size: float = 0.5) -> nn.Linear:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(size)
    return model


# -- eps --


@pytest.mark.parametrize(
    ("dtype", "eps", "smallest"),
    [(torch.float16, 1e-8, "5.96e-08"), (torch.float16, 2.9e-8, "5.96e-08"), (torch.bfloat16, 1e-42, "9.18e-41")],
)
def test_an_eps_that_is_zero(dtype: torch.dtype, eps: float, smallest: str) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=eps)
    found = messages(lambda: initialize(model, optimizer, opt_level="O3", dtype=dtype))
    assert len(found) == 1
    assert found[0].startswith(f"Adam.param_groups[0]: eps={eps:g} is 0 in {dtype}, so a division by it gives inf")
    assert f"the smallest that survives is {smallest}." in found[0]
    assert "opt_level='O2'" in found[0]


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 6e-8), (torch.bfloat16, 1e-8), (torch.float16, 0.0)])
def test_an_eps_that_survives(dtype: torch.dtype, eps: float) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=eps)
    assert messages(lambda: initialize(model, optimizer, opt_level="O3", dtype=dtype)) == []


@pytest.mark.parametrize("name", ["FusedAdam", "FusedAdagrad", "FusedNovoGrad"])
def test_an_eps_that_the_optimizer_holds_in_fp32(name: str) -> None:
    model = linear()
    optimizer = getattr(optimizers, name)(model.parameters(), lr=0.1, eps=1e-8)
    assert messages(lambda: initialize(model, optimizer, opt_level="O3")) == []
    # It is a divisor by itself: the gradient's square is 0 in fp16.
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-4)
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    assert not torch.equal(model.weight, linear().half().weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_masters_and_fp32_have_no_such_problem(level: str) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, eps=1e-8)
    assert messages(lambda: initialize(model, optimizer, opt_level=level)) == []


# -- models --


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16])
@pytest.mark.parametrize(
    ("level", "then"),
    [("O1", "steps it in half precision"), ("O2", "makes its fp32 master of the rounded values")],
)
def test_a_model_that_is_half_before_initialize(level: str, then: str, cast: Any) -> None:
    model = cast(nn.Sequential(nn.Linear(2, 2)))
    dtype = model[0].weight.dtype
    found = messages(lambda: initialize(model, opt_level=level))
    assert len(found) == 1
    assert f"parameter '0.weight' of Sequential is in {dtype} already" in found[0]
    assert f"opt_level={level!r} {then}. Give initialize() the model in fp32, without .half()" in found[0]
    assert messages(lambda: initialize(nn.Linear(1, 1), opt_level=level)) == []


def test_a_batch_norm_in_half_at_o3() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found = messages(lambda: initialize(model, opt_level="O3"))
    assert len(found) == 1
    assert found[0].startswith("BatchNorm1d '1' keeps its running statistics in torch.float16")
    assert "keep_batchnorm_fp32=True" in found[0]
    assert messages(lambda: initialize(model, opt_level="O3", keep_batchnorm_fp32=True)) == []
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    assert messages(lambda: initialize(plain, opt_level="O3")) == []


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("keep", [True, False])
def test_keep_batchnorm_fp32_without_effect_warns(level: str, keep: bool) -> None:
    found = messages(lambda: initialize(nn.Linear(1, 1), opt_level=level, keep_batchnorm_fp32=keep))
    assert found == [f"keep_batchnorm_fp32={keep!r} has no effect at opt_level={level!r}, which leaves models in fp32"]


# -- mistakes: scaled gradients clipped, gradients that underflow --


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
def test_the_norm_of_scaled_gradients_warns_at_the_line(opt_level: str | None) -> None:
    model, optimizer, handle = begun(opt_level, loss_scale=128.0)
    with handle.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        with pytest.warns(UserWarning, match="get_total_norm was called inside the scale_loss block of Adam") as caught:
            torch.nn.utils.get_total_norm(tensors=grads)
    assert caught[0].filename == __file__


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
