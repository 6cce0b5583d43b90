"""Disabled torch.autocast regions turn casts off, but for those that torch enters for itself; enabled ones cast."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
        with autoamp.region():
            assert F.linear(x, x).dtype is HALF
        assert F.linear(x, x).dtype is torch.float32
    assert F.linear(x, x).dtype is HALF
    with pytest.raises(KeyError), off():
        raise KeyError
    assert F.linear(x, x).dtype is HALF
    assert off()(lambda: F.linear(x, x))().dtype is torch.float32
    with pytest.warns(FutureWarning, match="deprecated"):
        region = torch.cpu.amp.autocast(enabled=False)
    with region:
        assert F.linear(x, x).dtype is torch.float32
    assert F.linear(x, x).dtype is HALF


class Full(torch.nn.Module):
    """A layer of a program, which torch calls, with a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with off():
            return F.linear(x, x)


@pytest.mark.parametrize("name", ["a_program", "torchvision.ops", "zoo"])
def test_regions_are_the_program_s_whatever_its_name_and_caller(handle: autoamp.Handle, x: Tensor, name: str) -> None:
    assert Full()(x).dtype is torch.float32
    seen: dict[str, Any] = {"__name__": name, "off": off, "F": F, "x": x}
    exec("with off():\n    dtype = F.linear(x, x).dtype", seen)
    assert seen["dtype"] is torch.float32


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
        # CPU autocast lists no softmax.
        assert torch.softmax(x.half(), -1).dtype is x.half().exp_().dtype is torch.float16
        with off():
            assert F.linear(x, x).dtype is torch.float32
        # The region of autoamp says nothing of torch's.
        with autoamp.region(enabled=False):
            assert F.linear(x, x).dtype is torch.float16
    with off(), torch.autocast("cpu", dtype=torch.float16):
        assert F.linear(x, x).dtype is torch.float16
    assert F.linear(x, x).dtype is HALF


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
