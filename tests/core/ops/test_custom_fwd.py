"""Functions with `torch.amp.custom_fwd`: with ``cast_inputs`` forward and backward run in fp32, else as around them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.core import original_of

HALF, FP32 = torch.bfloat16, torch.float32


def is_own_on() -> bool:
    """Whether torch's own autocast is on."""
    return bool(original_of(torch.is_autocast_enabled)("cpu"))


class Protected(torch.autograd.Function):
    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight
        Protected.seen.extend([x.dtype, weight.dtype, y.dtype])
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.t()
        Protected.seen.append(grad_x.dtype)
        # A region that the function opens itself has a half dtype.
        assert torch.autocast("cpu").fast_dtype is HALF
        return grad_x, x.t() @ grad


class Plain(torch.autograd.Function):
    """With the decorators, and without `cast_inputs`."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight
        Plain.seen.extend([y.dtype, is_own_on()])
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.t()
        Plain.seen.extend([grad_x.dtype, is_own_on()])
        return grad_x, x.t() @ grad


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(3, 3), function
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.first(x), self.weight)


@pytest.fixture(params=["global", "modules"])
def handle(request: pytest.FixtureRequest) -> autoamp.Handle:
    Protected.seen.clear()
    Plain.seen.clear()
    return autoamp.init(device_type="cpu", dtype=HALF, scope=request.param)


def train(how: str, handle: autoamp.Handle, model: Calls) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    called: Any = model
    if how.startswith("checkpoint"):
        called = nn.Identity()
        called.forward = lambda x: checkpoint(model, x, use_reentrant=how.endswith("reentrant"))
    backward = called(x).float().sum().backward
    if how == "thread":
        # As on CUDA, where autograd has threads of its own.
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert model.weight.grad is not None


HOW = ["plain", "thread", "checkpoint", "checkpoint, reentrant"]


@pytest.mark.parametrize("how", HOW)
def test_cast_inputs_mean_fp32_in_forward_and_backward(handle: autoamp.Handle, how: str) -> None:
    train(how, handle, Calls(Protected))
    assert len(Protected.seen) == (7 if how.startswith("checkpoint") else 4)
    assert set(Protected.seen) == {FP32}
    assert not is_own_on()


@pytest.mark.parametrize("how", HOW)
def test_without_them_backward_casts_as_forward_did_and_no_region_of_torch_is_opened(
    handle: autoamp.Handle, how: str
) -> None:
    train(how, handle, Calls(Plain))
    assert set(Plain.seen) == {HALF, False}


class Sizes(torch.autograd.Function):
    """Its results are the sizes of the numbers that it computes in, also in compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.full_like(x, float((x @ weight).element_size()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, weight = ctx.saved_tensors
        return None, torch.full_like(weight, float((grad @ weight.t()).element_size()))


def decorated(cast_inputs: torch.dtype | None) -> Any:
    forward = torch.amp.custom_fwd(Sizes.forward, device_type="cpu", cast_inputs=cast_inputs)
    backward = torch.amp.custom_bwd(Sizes.backward, device_type="cpu")
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Decorated", (torch.autograd.Function,), functions)


@pytest.mark.parametrize(("cast_inputs", "size"), [(FP32, 4), (None, 2)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_that_holds_in_compiled_code(
    handle: autoamp.Handle, backend: str, cast_inputs: torch.dtype | None, size: int
) -> None:
    for how in ("plain", backend):
        model = Calls(decorated(cast_inputs))
        x = torch.randn(2, 3)
        called: Any = model if how == "plain" else torch.compile(model, backend=how, fullgraph=True)
        output = called(x).float()
        output.sum().backward()
        assert (output == size).all()
        assert (model.weight.grad == size).all()
    with handle.disable_casts():
        assert (called(x) == 4).all()
    torch._dynamo.reset()


def test_off_is_off(handle: autoamp.Handle) -> None:
    with handle.disable_casts():
        train("plain", handle, Calls(Protected))
        train("plain", handle, Calls(Plain))
    assert set(Protected.seen) == {FP32}
    assert set(Plain.seen) == {FP32, False}
    handle.deactivate()
    train("plain", handle, Calls(Protected))


def test_in_torchs_region_torch_decides(handle: autoamp.Handle) -> None:
    with torch.autocast("cpu", HALF):
        train("plain", handle, Calls(Protected))
        train("plain", handle, Calls(Plain))
    assert set(Protected.seen) == {FP32}
    assert set(Plain.seen) == {HALF, True}
