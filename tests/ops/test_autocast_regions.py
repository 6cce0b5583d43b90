"""Disabled torch.autocast regions turn casts off, but for those that torch enters for itself; enabled ones cast."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

HALF = torch.bfloat16


@pytest.fixture
def handle() -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=HALF)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 3)


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def test_a_disabled_region_casts_nothing_and_ends(handle: autoamp.Handle, x: Tensor) -> None:
    with off():
        assert F.linear(x, x).dtype is torch.float32
        with off():
            assert F.linear(x, x).dtype is torch.float32
        assert F.linear(x, x).dtype is torch.float32
    assert F.linear(x, x).dtype is HALF
    with pytest.raises(KeyError), off():
        raise KeyError
    assert F.linear(x, x).dtype is HALF


def test_the_decorator_and_the_classes_by_device(handle: autoamp.Handle, x: Tensor) -> None:
    assert off()(lambda: F.linear(x, x))().dtype is torch.float32
    with pytest.warns(FutureWarning, match="deprecated"):
        region = torch.cpu.amp.autocast(enabled=False)
    with region:
        assert F.linear(x, x).dtype is torch.float32
    with contextlib.ExitStack() as stack:
        stack.enter_context(off())
        assert F.linear(x, x).dtype is torch.float32
    assert F.linear(x, x).dtype is HALF


def test_regions_of_other_devices_and_threads_are_not_ours(handle: autoamp.Handle, x: Tensor) -> None:
    with torch.autocast("cuda", enabled=False):
        assert F.linear(x, x).dtype is HALF
    seen: list[torch.dtype] = []
    with off():
        thread = threading.Thread(target=lambda: seen.append(F.linear(x, x).dtype))
        thread.start()
        thread.join()
    assert seen == [HALF]


def test_enabled_regions_cast_alone(handle: autoamp.Handle, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert F.linear(x, x).dtype is torch.float16
        with off():
            assert F.linear(x, x).dtype is torch.float32
        # The region of autoamp says nothing of torch's.
        with autoamp.region(enabled=False):
            assert F.linear(x, x).dtype is torch.float16
    with off(), torch.autocast("cpu", dtype=torch.float16):
        assert F.linear(x, x).dtype is torch.float16
    assert F.linear(x, x).dtype is HALF


def test_a_region_of_autoamp_within_a_disabled_one_casts(handle: autoamp.Handle, x: Tensor) -> None:
    with off():
        with autoamp.region():
            assert F.linear(x, x).dtype is HALF
        assert F.linear(x, x).dtype is torch.float32


def test_a_region_that_is_open_when_the_handle_comes_or_goes(x: Tensor) -> None:
    with off():
        handle = autoamp.init(device_type="cpu", dtype=HALF)
    assert F.linear(x, x).dtype is HALF
    with off():
        handle.deactivate()
        assert F.linear(x, x).dtype is torch.float32
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    assert F.linear(x, x).dtype is HALF


class Doubles(torch.autograd.Function):
    """A function in the manner that torch.amp prescribes."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Doubles.seen.append((grad @ weight.T).dtype)
        return grad @ weight.T, x.T @ grad


def test_what_torch_restores_for_itself_leaves_casts_on(handle: autoamp.Handle, x: Tensor) -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    # custom_bwd enters a region that is disabled, since none was enabled in forward.
    Doubles.apply(x, weight).float().sum().backward()
    assert Doubles.seen == [HALF]
    reference = torch.ones(3, 3, dtype=HALF)
    assert weight.grad is not None
    assert torch.equal(weight.grad, (x.to(HALF).T @ reference).float())


def test_checkpoints_within_and_without(handle: autoamp.Handle, x: Tensor) -> None:
    layer, seen = nn.Linear(3, 3), []

    def block(value: Tensor) -> Tensor:
        hidden = layer(value)
        seen.append(hidden.dtype)
        return layer(hidden)

    for use_reentrant in (True, False):
        inputs = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=use_reentrant).float().sum().backward()
        assert seen == [HALF, HALF]
        seen.clear()
        with off():
            out = torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=use_reentrant)
        out.sum().backward()
        assert seen == [torch.float32, torch.float32]
        seen.clear()


def test_a_grad_scaler_and_autocast_train_as_without_us(x: Tensor) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach() for parameter in model.parameters()]

    without = train()
    autoamp.init(device_type="cpu", dtype=torch.float16)
    assert all(map(torch.equal, train(), without))
