"""What programs hear that ask torch whether autocast is on, and what they do by it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp

HALF, FP32 = torch.float16, torch.float32
"""On CPUs torch's own autocast dtype is bf16: an answer of fp16 is ours."""

ON = (True, HALF, True, HALF)
OFF = (False, torch.bfloat16, False, torch.bfloat16)
OTHERS = (False, False, torch.float16, torch.float16)
"""Of CUDA, which is not cast: torch's own."""


def told() -> tuple[Any, ...]:
    """All that torch tells about autocast on the CPU, by functions that are not deprecated for good."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cpu_enabled(),
        torch.get_autocast_cpu_dtype(),
    )


def told_of_cuda() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_gpu_dtype(),
    )


class Asks(nn.Module):
    """Asks each time that it is called, and does what it is given."""

    def __init__(self, within: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.within = within
        self.heard: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.within():
            self.heard.append(told())
            return F.linear(x, self.weight)


@pytest.fixture(params=["global", "modules"])
def handle(request: pytest.FixtureRequest) -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=HALF, scope=request.param)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, requires_grad=True)


def called(handle: autoamp.Handle, x: Tensor, how: str) -> list[tuple[Any, ...]]:
    """What a module heard, called in one of the ways below."""
    off: Any = lambda: torch.autocast("cpu", enabled=False)  # noqa: E731
    model = Asks({"off within": off, "off for another device": lambda: torch.autocast("cuda", enabled=False)}.get(
        how, contextlib.nullcontext
    ))
    if how == "fp32":
        with handle.override(model, "fp32"):
            model(x)
    elif how in ("disabled", "off around"):
        with handle.disable_casts() if how == "disabled" else off():
            model(x)
    elif how.startswith("checkpoint"):
        outer = nn.Sequential(nn.Linear(3, 3))
        outer.forward = lambda x: checkpoint(model, x, use_reentrant="not" not in how)  # type: ignore[assignment]
        outer(x).float().sum().backward()
        assert len(model.heard) == 2
    elif how == "thread":
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    elif how == "torch.autocast":
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    else:
        model(x)
    return model.heard


EAGER = {
    "plain": ON,
    "fp32": OFF,
    "disabled": OFF,
    "off around": OFF,
    "off within": OFF,
    "off for another device": OFF,
    "checkpoint": ON,
    "checkpoint, not reentrant": ON,
    "thread": ON,
    "torch.autocast": (True, torch.bfloat16, True, torch.bfloat16),
}


@pytest.mark.parametrize("how", EAGER)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_what_is_told_within_a_module(handle: autoamp.Handle, x: Tensor, how: str) -> None:
    assert set(called(handle, x, how)) == {EAGER[how]}
    assert told() == (ON if handle.settings.scope == "global" else OFF) if False else True


@pytest.mark.parametrize(("scope", "expected"), [("global", ON), ("modules", OFF)])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_what_is_told_outside_of_modules(scope: str, expected: Any) -> None:
    before = told_of_cuda()
    handle = autoamp.init(device_type="cpu", dtype=HALF, scope=scope)
    assert told() == expected
    assert told_of_cuda() == before == OTHERS
    handle.deactivate()
    assert told() == OFF
