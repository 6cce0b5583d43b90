"""What runs again, or in another thread, casts as it did at first: checkpoints, custom functions, data parallel."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.core.modules.watches import FP32, HALF, Watch


class Checkpointed(nn.Module):
    """Checkpoints what is within, as models do on their own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.watch = Watch()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.watch, x, use_reentrant=self.use_reentrant)


AROUND: dict[str, Any] = {
    "nothing": lambda handle, model: contextlib.nullcontext(),
    "override": lambda handle, model: handle.override(model, "fp32"),
    "disable_casts": lambda handle, model: handle.disable_casts(),
    "autocast off": lambda handle, model: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["backward after", "backward within"])
@pytest.mark.parametrize("around", AROUND)
def test_checkpoints_recompute_as_they_computed(
    handle: autoamp.Handle, around: str, use_reentrant: bool, within: bool
) -> None:
    model = Checkpointed(use_reentrant)
    x = torch.randn(2, 4, requires_grad=True)
    dtype = HALF if around == "nothing" else FP32
    with AROUND[around](handle, model):
        output = model(x)
        assert model.watch.seen == [FP32, dtype]
        if within:
            output.float().sum().backward()
    if not within:
        output.float().sum().backward()
    # Without reentrance the recomputation ends as soon as backward has all tensors; of other dtypes torch refuses them.
    assert model.watch.seen == [FP32, dtype]
    assert set(model.watch.returned) == {dtype}
    assert model(x).dtype == HALF


def test_threads_of_data_parallel_cast_as_the_thread_that_calls(parallel_on_cpu: None) -> None:
    model, inputs = nn.Linear(3, 3), [(torch.randn(2, 3),)] * 2

    def dtypes(function: Any) -> set[torch.dtype]:
        return {output.dtype for output in function([model, model], inputs)}

    names = ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply")
    with autoamp.region(device_type="cpu", dtype=HALF):
        for name in names:
            assert dtypes(sys.modules[name].parallel_apply) == {HALF}
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    assert dtypes(torch.nn.parallel.parallel_apply) == {HALF}
    for off in (handle.disable_casts(), torch.autocast("cpu", enabled=False)):
        with off:
            assert dtypes(torch.nn.parallel.parallel_apply) == {FP32}
    handle.deactivate()
    assert dtypes(torch.nn.parallel.parallel_apply) == {FP32}


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
