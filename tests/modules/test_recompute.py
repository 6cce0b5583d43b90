"""What runs again, or in another thread, casts as it did at first: checkpoints, custom functions, data parallel."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.modules.recompute import build_recompute
from autoamp.runtime import runtime_of
from tests.modules.watches import FP32, HALF, LISTS, Watch


@pytest.fixture
def recomputing(handle: autoamp.Handle, monkeypatch: pytest.MonkeyPatch) -> autoamp.Handle:
    """What keeps a function for backward, patched; whether or not the handle patches it too."""
    for owner, name, position in (
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", 0),
        (torch.utils.checkpoint.CheckpointFunction, "forward", 1),
    ):
        original = inspect.getattr_static(owner, name)
        monkeypatch.setattr(owner, name, build_recompute(original, runtime_of(handle).casts, position))
    return handle


class Checkpointed(nn.Module):
    """Checkpoints what is within, as models do on their own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.watch = Watch()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.watch, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["backward after", "backward within"])
def test_checkpoints_within_an_override(recomputing: autoamp.Handle, use_reentrant: bool, within: bool) -> None:
    model = Checkpointed(use_reentrant)
    x = torch.randn(2, 4, requires_grad=True)
    with recomputing.override(model, "fp32"):
        output = model(x)
        if within:
            output.sum().backward()
    if not within:
        output.sum().backward()
    assert model.watch.seen == [FP32, FP32]
    assert model.watch.returned == [FP32]
    assert runtime_of(recomputing).casts.local.on
    assert model(x).dtype == HALF


def test_checkpoints_within_disable_casts(recomputing: autoamp.Handle) -> None:
    model = Checkpointed(use_reentrant=False)
    with recomputing.disable_casts():
        output = model(torch.randn(2, 4))
    output.sum().backward()
    assert model.watch.seen == [FP32, FP32]
    assert runtime_of(recomputing).casts.local.on
    assert not {"on", "forced_off"} & vars(runtime_of(recomputing).casts.local).keys()


def test_recomputation_in_another_thread() -> None:
    with autoamp.region(device_type="cpu", dtype=HALF, lists=LISTS) as handle:
        kept = runtime_of(handle).casts.remembered(lambda x: torch.mm(x, x).dtype)
        seen = []
        thread = threading.Thread(
            target=lambda: seen.extend([kept(torch.ones(2, 2)), runtime_of(handle).casts.local.on])
        )
        thread.start()
        thread.join()
        assert seen == [HALF, False]


def test_checkpointed_override(handle: autoamp.Handle) -> None:
    model = Watch()
    x = torch.randn(2, 4, requires_grad=True)
    with handle.override(model, "fp32"):
        checkpoint(model, x, use_reentrant=False).sum().backward()
        assert model.seen == [FP32, FP32]
    assert x.grad is not None


def test_threads_of_data_parallel_cast_as_the_thread_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # What parallel_apply asks of an accelerator, answered by the CPU.
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    model, inputs, half = nn.Linear(3, 3), [(torch.randn(2, 3),)] * 2, torch.bfloat16

    def dtypes(function: Any) -> set[torch.dtype]:
        return {output.dtype for output in function([model, model], inputs)}

    names = ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply")
    with autoamp.region(device_type="cpu", dtype=half):
        for name in names:
            assert dtypes(sys.modules[name].parallel_apply) == {half}
    handle = autoamp.init(device_type="cpu", dtype=half)
    assert dtypes(torch.nn.parallel.parallel_apply) == {half}
    with handle.disable_casts():
        assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}
    with torch.autocast("cpu", enabled=False):
        assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}
    handle.deactivate()
    assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}


class Projects(torch.autograd.Function):
    """A function whose backward calls a listed op, and notes in which dtype it ran."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Projects.seen.append(F.linear(x, weight).dtype)
        return gradient @ weight.to(gradient.dtype), gradient.T @ x.to(gradient.dtype)


def test_backward_of_a_custom_function_casts_as_its_forward_in_whatever_thread() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    half = torch.bfloat16

    def backward(output: Tensor) -> torch.dtype:
        thread = threading.Thread(target=output.float().sum().backward)
        thread.start()
        thread.join()
        return Projects.seen.pop()

    with autoamp.region(device_type="cpu", dtype=half):
        output = Projects.apply(x, weight)
        # Another thread is off by default; autograd's own on CUDA is one.
        assert backward(output) is half
    handle = autoamp.init(device_type="cpu", dtype=half)
    with handle.disable_casts():
        output = Projects.apply(x, weight)
    assert backward(output) is torch.float32
    output = Projects.apply(x, weight)
    with handle.disable_casts():
        output.float().sum().backward()
    assert Projects.seen.pop() is half
    # The graph outlives the handle.
    output = Projects.apply(x, weight)
    handle.deactivate()
    assert backward(output) is torch.float32
    other = autoamp.init(device_type="cpu", dtype=torch.float16)
    with other.disable_casts():
        assert backward(Projects.apply(x, weight)) is torch.float32
    compiled = torch.compile(lambda a: Projects.apply(a, weight), backend="aot_eager")
    assert compiled(x).dtype is torch.float16
    torch._dynamo.reset()
