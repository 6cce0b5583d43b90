"""Planted faults: verdict, op, module and line of each, and that looking on changes no result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp import torch_private
from autoamp.diagnostics import (
    Communication,
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    ScaleSearch,
)
from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.runtime import current_handle, current_runtime, runtime_of
from autoamp.scaling import DynamicLossScaler, UnreadFlags


class Net(nn.Module):
    """Two layers with a hook for a fault between them, and dropout, which draws random numbers."""

    def __init__(self, fault: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.faulty = Faulty(fault)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.faulty(self.drop(self.norm(self.first(x)))))
        return out


class Faulty(nn.Module):
    """Calls a function."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, h: Tensor) -> Tensor:
        return self.fault(h)


def mean_square(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def train(
    net: nn.Module,
    *,
    scale: Any = 256.0,
    steps: int = 1,
    loss: Callable[[Tensor], Tensor] = mean_square,
    data: Callable[[Tensor, int], Tensor] = lambda x, step: x,
    **settings: Any,
) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=scale, trace_overflow=True, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(net(data(torch.randn(5, 4, generator=generator), step)))
        with handle.scale_loss(value, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return handle


def found_in(handle: autoamp.Handle) -> Overflow:
    found = handle.last_overflow
    assert found is not None
    assert json.loads(json.dumps(found.to_dict()))["kind"] == found.kind
    return found


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines, start=first) if text in line)
    return f"{os.path.relpath(str(inspect.getsourcefile(function)))}:{number}"


def squared(h: Tensor) -> Tensor:
    big = h.half() * 1000.0
    return big * big


def doubled(h: Tensor) -> Tensor:
    return F.linear(h.float() * 1e6, torch.eye(8))


def steep_in_half(h: Tensor) -> Tensor:
    return h.half().mul(0.001).mul(500.0)


def root_of_zero(h: Tensor) -> Tensor:
    return h.mul(0).sqrt()


def half_root_of_zero(h: Tensor) -> Tensor:
    return h.half().mul(0).sqrt()


def overflowing_in_fp32(h: Tensor) -> Tensor:
    return h.float() * 1e30 * 1e30


def masked(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.arange(8) > 5, float("-inf"))
    safe = torch.where(h > 100, torch.log(torch.zeros_like(h.detach())), h)
    return scores.softmax(-1) + safe


def masked_and_squared(h: Tensor) -> Tensor:
    return squared(h) + masked(h)


def test_forward_op() -> None:
    found = found_in(train(Net(squared)))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.module, found.phase, found.value) == ("mul", "faulty", "forward", "inf")
    assert found.location == line_of(squared, "big * big")
    assert found.suggestion is not None
    assert 'fp32 = ["__mul__", "__rmul__"]' in found.suggestion
    assert found.fp32_names == ("__mul__", "__rmul__")
    assert max(found.verdict.magnitudes) > 256
    assert (found.iteration, found.loss_scale, found.kind) == (0, 256.0, "half_precision_op")


BIG: dict[str, Callable[[Tensor], Tensor]] = {
    "__mul__": lambda h: h * h,
    "__rmul__": lambda h: 3e4 * h,
    "__imul__": lambda h: operator.imul(h.clone(), h),
    "mul": lambda h: torch.mul(h, h),
    "Tensor.mul": lambda h: h.mul(h),
    "operator.mul": lambda h: operator.mul(h, h),
    "mul_": lambda h: h.clone().mul_(h),
    "multiply": lambda h: h.multiply(h),
    "__add__": lambda h: h.clamp(6e4, 6e4) + h.clamp(6e4, 6e4),
    "__radd__": lambda h: 6e4 + h.clamp(6e4, 6e4),
    "__sub__": lambda h: h.clamp(6e4, 6e4) - h.clamp(-6e4, -6e4),
    "__rsub__": lambda h: 6e4 - h.clamp(-6e4, -6e4),
    "__truediv__": lambda h: h.clamp(6e4, 6e4) / h.clamp(0.01, 0.01),
    "__pow__": lambda h: h**2,
    "__rpow__": lambda h: 1e4 ** h.clamp(2.0, 2.0),
    "__matmul__": lambda h: h @ h.clamp(500.0, 500.0).T,
}


@pytest.mark.parametrize("name", BIG)
def test_the_suggested_entry_avoids_the_overflow(name: str) -> None:
    # In fp32 by the shipped lists. `Tensor.__rpow__` calls torch.pow.
    alone = ["__pow__", "__rpow__", "pow"] if "pow" in name else []

    def fault(h: Tensor) -> Tensor:
        big = h.detach().half().clamp(1e3, 1e3) + 0 * h.half()
        return h + 1e-9 * BIG[name](big).sum(dtype=torch.float32)

    found = found_in(train(Net(fault), lists={"none": alone}))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert found.fp32_names
    assert found.suggestion is not None
    assert json.dumps(found.fp32_names) in found.suggestion
    in_place = name in ("__imul__", "mul_")
    assert ("out of place" in found.suggestion) is in_place
    handle = train(
        Net(fault_out_of_place if in_place else fault),
        lists={"fp32": list(found.fp32_names), "none": [op for op in alone if op not in found.fp32_names]},
    )
    assert handle.last_overflow is None
    assert not handle.last_step_skipped


BIG_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "__mul__": lambda h: h * 500.0,
    "__rmul__": lambda h: 500.0 * h,
    "mul": lambda h: torch.mul(h, 500.0),
    "Tensor.mul": lambda h: h.mul(500.0),
    "__truediv__": lambda h: h / 0.002,
    "div": lambda h: torch.div(h, 0.002),
    "__matmul__": lambda h: h @ (500.0 * torch.eye(8)).half(),
    "matmul": lambda h: torch.matmul(h, (500.0 * torch.eye(8)).half()),
    "linear": lambda h: F.linear(h, (500.0 * torch.eye(8)).half()),
}


@pytest.mark.parametrize("name", BIG_BACKWARD)
def test_the_suggested_entry_avoids_an_overflow_of_the_backward_pass(name: str) -> None:
    """Gradients of 1000 that an op multiplies by 500, of activations that are small enough in the forward pass."""

    def fault(h: Tensor) -> Tensor:
        return BIG_BACKWARD[name](h.half() * 0.001)

    def loss(out: Tensor) -> Tensor:
        return (out.float() * 1000.0).sum()

    def net() -> Net:
        torch.manual_seed(0)
        made = Net(fault)
        with torch.no_grad():
            made.last.weight.copy_(torch.eye(4, 8))
        return made

    found = found_in(train(net(), scale=1.0001, loss=loss))
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)
    assert (found.phase, found.module) == ("backward", "faulty")
    assert found.suggestion is not None
    assert json.dumps(found.fp32_names) in found.suggestion
    # On demand it is the same.
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.0001)
    again, x = net(), torch.randn(5, 4)
    explained = handle.explain_overflow(lambda: loss(again(x)))
    assert explained is not None
    assert (explained.op, set(explained.fp32_names)) == (found.op, set(found.fp32_names))
    handle.deactivate()
    handle = train(net(), scale=1.0001, loss=loss, lists={"fp32": list(found.fp32_names)})
    assert handle.last_overflow is None
    assert not handle.last_step_skipped


def test_a_gradient_that_no_list_can_help_is_said_to_be_so() -> None:
    def fault(h: Tensor) -> Tensor:
        half = (h.float() * 0.001).half()
        return torch.mul(half, 500.0)

    net = Net(fault)
    with torch.no_grad():
        net.last.weight.copy_(torch.eye(4, 8))
    found = found_in(train(net, scale=1.0001, loss=lambda out: (out.float() * 1000.0).sum()))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert found.fp32_names == ("mul",)
    assert found.suggestion is not None
    assert f"make no half tensor at {line_of(fault, '.half()')}" in found.suggestion
    # What the loss makes too large for the model's output.
    found = found_in(train(Net(), scale=1.0001, loss=lambda out: (out.float() * 1e6).sum(), steps=2))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.fp32_names) == ("float", ())
    assert found.suggestion is not None
    assert "make the loss smaller" in found.suggestion


def fault_out_of_place(h: Tensor) -> Tensor:
    big = h.detach().half().clamp(1e3, 1e3) + 0 * h.half()
    return h + 1e-9 * (big * big + big.mul(big)).sum(dtype=torch.float32)


def test_a_rule_on_another_name_of_the_op_changes_no_replay() -> None:
    # Torch looks `Tensor.mul` up for `y * y`, where the replacement stands that the program does not call.
    found = found_in(train(Net(squared), lists={"fp32": ["mul"]}))
    assert (found.kind, found.op) == ("half_precision_op", "mul")
    assert found.fp32_names == ("__mul__", "__rmul__")


def test_a_cast_belongs_to_its_op() -> None:
    found = found_in(train(Net(doubled)))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert found.verdict.in_cast
    assert (found.op, found.module, found.phase) == ("linear", "faulty", "forward")
    assert found.location == line_of(doubled, "F.linear")


def test_backward_op() -> None:
    found = found_in(train(Net(steep_in_half), scale=1.5, loss=lambda out: (out.float() * 1000.0).sum()))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.module, found.phase) == ("mul", "faulty", "backward")
    assert found.location == line_of(steep_in_half, "mul(500.0)")
    assert found.parameter is not None


def test_backward_that_is_not_finite_in_fp32() -> None:
    found = found_in(train(Net(root_of_zero)))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.op, found.module, found.phase) == ("sqrt", "faulty", "backward")
    assert found.location == line_of(root_of_zero, "sqrt")
    # What comes after in the forward pass has finite gradients.
    assert found.parameter is not None
    assert found.parameter.startswith(("first", "norm"))


def test_one_parameter() -> None:
    net = Net()
    with torch.no_grad():
        net.first.weight[2, 1] = float("nan")
    found = found_in(train(net))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.module) == ("weights", "first.weight", "first")


def test_loss() -> None:
    def loss(out: Tensor) -> Tensor:
        return out.float().mul(1000.0).abs().exp().mul(1e20).mean()

    handle = train(Net(), loss=loss, steps=2)
    found = found_in(handle)
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert found.op == "exp"
    assert (found.phase, found.location) == ("forward", line_of(loss, "exp()"))
    # At the first overflow already: the first step of all is watched.
    assert [one.location for one in handle.overflows] == [found.location] * 2


@pytest.mark.parametrize("since", [0, 6])
def test_a_model_that_draws_numbers_from_some_step_on(since: int) -> None:
    step = [0]

    def fault(h: Tensor) -> Tensor:
        drawn = F.dropout(h.float(), 0.5) if step[0] >= since else h.float()
        return squared(drawn) if step[0] in (8, 9) else drawn

    def data(x: Tensor, number: int) -> Tensor:
        step[0] = number
        return x

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.faulty, self.last = nn.Linear(4, 8), Faulty(fault), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.faulty(self.first(x)))
            return out

    handle = train(Plain(), data=data, steps=10)
    place = line_of(squared, "big * big")
    assert [(one.kind, one.iteration, one.op, one.location) for one in handle.overflows] == [
        ("half_precision_op", 8, "mul", place), ("half_precision_op", 9, "mul", place),
    ]  # fmt: skip


def test_a_half_op_of_the_loss() -> None:
    def loss(out: Tensor) -> Tensor:
        big = 512.0 * (out.half() + 1.0)
        return (big * big * big).sum(dtype=torch.float32) * 1e-9

    found = found_in(train(Net(), loss=loss))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.verdict.dtype, found.op, found.phase, found.value) == ("float16", "mul", "forward", "inf")
    assert max(found.verdict.magnitudes) ** 2 > 65504 > max(found.verdict.magnitudes)
    assert found.location == line_of(loss, "big * big")
    assert found.suggestion is not None
    assert "__mul__" in found.suggestion
    # What is suggested mends it.
    lists = {"extends": ["default"], "fp32": list(found.fp32_names)}
    handle = train(Net(), loss=loss, lists=lists)
    assert handle.last_overflow is None


def test_an_op_of_the_loss_of_which_nothing_tells_whether_fp32_holds_it() -> None:
    def loss(out: Tensor) -> Tensor:
        return (out.half().mul(0.0) + 1.0).erfinv().sum(dtype=torch.float32)

    found = found_in(train(Net(), loss=loss, lists={"extends": []}))
    assert isinstance(found.verdict, NotLocated)
    assert (found.op, found.location, found.phase) == ("erfinv", line_of(loss, "erfinv()"), "forward")
    assert str(found).startswith("step 0 overflowed at loss scale 256: erfinv at ")
    assert "made inf: it is not known whether fp32 would be finite" in str(found)


def test_the_op_of_a_loss_that_follows_from_half_ops() -> None:
    def loss(out: Tensor) -> Tensor:
        return ((out.half() + 20.0) + 1.0).exp().sum(dtype=torch.float32)

    found = found_in(train(Net(), loss=loss, lists={"extends": []}))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.phase, found.value) == ("exp", "forward", "inf")
    assert found.location == line_of(loss, "exp()")


@pytest.mark.parametrize("precision", ["fp32", "half"])
def test_a_loss_that_overflows_later_is_located_at_the_next_overflow(precision: str) -> None:
    big = [1.0]

    def loss(out: Tensor) -> Tensor:
        size = (out.half() if precision == "half" else out.float()).abs() * big[0]
        return size.sqrt().pow(4).mean()

    def data(x: Tensor, step: int) -> Tensor:
        big[0] = 1.0 if step not in (4, 6) else 1e4 if precision == "half" else 1e30
        return x

    first, second = train(Net(), loss=loss, data=data, steps=8, lists={"none": ["pow"]}).overflows
    assert (first.iteration, first.kind, first.op, first.location) == (4, "not_located", None, None)
    assert "not watched in this step; watching the next 8 steps" in str(first)
    assert (second.iteration, second.op, second.phase) == (6, "pow", "forward")
    assert second.location == line_of(loss, "pow(4)")
    assert second.kind == {"half": "half_precision_op", "fp32": "not_finite_in_fp32"}[precision]


class Passing(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Passing, functools.partial(torch.device, "cpu")])
@pytest.mark.parametrize("enters", ["before", "within"])
def test_modes_of_the_program_that_end_within_the_loss(kind: Callable[[], Any], enters: str) -> None:
    mode = kind()

    def data(x: Tensor, step: int) -> Tensor:
        if enters == "before":
            mode.__enter__()
        return x

    def loss(out: Tensor) -> Tensor:
        if enters == "within":
            mode.__enter__()
        size = out.float().mul(1e30)
        mode.__exit__(None, None, None)
        return size.pow(2).sum()

    assert found_in(train(Net(), loss=loss, data=data)).location == line_of(loss, "pow(2)")
    assert not torch_private.in_function_mode()


def test_a_compiled_loss_is_left_alone() -> None:
    def trained(traced: bool) -> Tensor:
        torch.manual_seed(0)
        torch._dynamo.reset()
        loss = torch.compile(mean_square, backend="eager")
        net = nn.Linear(4, 4)
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            with handle.scale_loss(loss(net(torch.randn(5, 4))), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert handle.skipped_steps == 0
        handle.deactivate()
        return net.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_a_stack_trace_of_a_call_has_two_frames_of_the_package() -> None:
    def fault(h: Tensor) -> Tensor:
        raise ValueError

    handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    net = Net(fault)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        net(torch.randn(5, 4))
    files = [str(entry.path) for entry in caught.traceback]
    package = str(Path(autoamp.__file__).parent)
    of_the_model = files[: next(i for i, entry in enumerate(caught.traceback) if entry.name == "forward")]
    assert sum(file.startswith(package) for file in of_the_model) == 2
    # The call that raised has ended.
    net.faulty.fault = squared
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert found_in(handle).module == "faulty"


def test_what_is_watched_ends_with_the_handle() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    out = Net()(torch.randn(5, 4))
    assert out.requires_grad
    assert torch_private.in_function_mode()
    handle.deactivate()
    assert not torch_private.in_function_mode()


def test_a_gradient_of_the_loss_that_a_lower_scale_mends() -> None:
    def loss(out: Tensor) -> Tensor:
        return (out.float().abs() * 1e30).mean()

    found = found_in(train(Net(), loss=loss, scale=2.0**40))
    assert isinstance(found.verdict, ScaleSearch)
    assert found.location == line_of(loss, "1e30")


def test_a_gradient_of_the_loss_that_no_scale_mends() -> None:
    def loss(out: Tensor) -> Tensor:
        return (out.float() * 0).abs().sqrt().mean()

    found = found_in(train(Net(), loss=loss))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.op, found.phase, found.location) == ("sqrt", "backward", line_of(loss, "sqrt()"))


@pytest.mark.parametrize(("scale", "kind"), [(4e5, "not_located"), (DynamicLossScaler(4e5), "scale_search")])
def test_a_cast_after_a_cross_entropy_that_a_lower_scale_mends(scale: Any, kind: str) -> None:
    """In clean steps nobody looks at the ops of a loss; at one step a gradient of 80000 is to be half."""

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, torch.zeros(5, dtype=torch.long))

    def data(x: Tensor, step: int) -> Tensor:
        return torch.ones(5, 4) * (1e2 if step == 4 else 1e-2)

    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.copy_(0.1 * torch.arange(4.0)[:, None])
    handle = train(net, loss=loss, data=data, steps=6, scale=scale)
    found = found_in(handle)
    assert len(handle.overflows) == 1
    assert (found.iteration, found.kind) == (4, kind)


def test_nan_of_a_cross_entropy_whose_loss_is_finite() -> None:
    """A row that is ignored: its gradient of 0 times what is not finite is nan."""
    offset = torch.zeros(5, 4)

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out.float() + offset, torch.tensor([0, 1, -100, 2, 3]))

    def data(x: Tensor, step: int) -> Tensor:
        offset[2] = float("-inf") if step in (3, 4) else 0.0
        return x

    first, found = train(Net(), loss=loss, data=data, steps=6).overflows
    assert isinstance(first.verdict, NotLocated)
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.iteration, found.op, found.phase, found.value) == (4, "cross_entropy", "backward", "nan")
    assert found.location == line_of(loss, "cross_entropy")


class Clone(torch.autograd.Function):
    """Is named as an op of torch's whose gradients nobody looks at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * float("inf")


def test_a_function_of_the_program_in_the_loss() -> None:
    def loss(out: Tensor) -> Tensor:
        return Clone.apply(out.float()).abs().mean()  # type: ignore[no-untyped-call,no-any-return]

    found = found_in(train(Net(), loss=loss))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.op, found.phase, found.location) == ("Clone", "backward", line_of(Clone, "float"))


def test_a_program_that_writes_to_the_outputs_of_its_model() -> None:
    """Their sums are kept, to be compared with those of the replay: not of what they became."""

    def loss(out: Tensor) -> Tensor:
        return mean_square(out.mul_(3.0))

    handle = train(Net(squared), loss=loss, steps=2)
    found = found_in(handle)
    assert (found.op, found.module, found.location) == ("mul", "faulty", line_of(squared, "big * big"))
    assert [one.location for one in handle.overflows] == [found.location] * 2


def test_an_inf_that_does_no_harm_is_not_blamed() -> None:
    """An output that overflows where the loss does not look, in a step that a lower scale mends."""

    class Wasteful(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return torch.cat([out, (out * 0 + 1000.0).half().mul(1000.0).to(out.dtype)])

    def loss(out: Tensor) -> Tensor:
        return mean_square(torch.where(out.detach().isfinite(), out, 0.0))

    net = Wasteful(lambda h: h.half().mul(100.0).float())
    found = found_in(train(net, scale=2.0**16, loss=loss))
    assert isinstance(found.verdict, ScaleSearch)


def test_a_frozen_model_before_it_is_found() -> None:
    frozen = Faulty(squared)
    net = Net()

    def data(x: Tensor, step: int) -> Tensor:
        return frozen(x * 10.0)

    def unharmed(x: Tensor, step: int) -> Tensor:
        frozen(x * 10.0)
        return x

    found = found_in(train(net, data=data))
    assert (found.op, found.module) == ("mul", "Faulty")
    assert found.location == line_of(squared, "big * big")
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    # An evaluation beside the training is not to blame.
    found = found_in(train(Net(lambda h: h.half().mul(100.0).float()), data=unharmed, scale=2.0**16))
    assert isinstance(found.verdict, ScaleSearch)


def test_minus_inf_in_the_data() -> None:
    def data(x: Tensor, step: int) -> Tensor:
        x[2, 0] = float("-inf")
        return x

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = found_in(train(net, data=data))
    assert isinstance(found.verdict, NotFiniteInFp32)


def test_two_passes_through_one_output() -> None:
    """The gradients of the second pass are not those of the first, which overflowed."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=2.0**14, trace_overflow=True)
    net = Net(lambda h: h.half().mul(100.0).float())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    out = net(torch.randn(5, 4))
    for factor in (1.0, 1e-4):
        with handle.scale_loss(mean_square(out) * factor, optimizer) as scaled:
            scaled.backward(retain_graph=True)
    optimizer.step()
    assert isinstance(found_in(handle).verdict, ScaleSearch)


def test_what_checkpoints_compute_again_is_no_call_of_the_program() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return out

    found = found_in(train(Checkpointed(squared)))
    assert (found.op, found.module, found.location) == ("mul", "faulty", line_of(squared, "big * big"))
    run = current_runtime()
    assert run is not None
    assert run.overflows is not None
    assert run.overflows.recorder.records == []


class Counting(Net):
    """Counts its calls, keeps what it computed, and draws from a generator of its own."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__(fault)
        self.calls, self.seen = 0, [0.0]
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x + torch.rand(4, generator=self.generator) * 1e-6)
        self.seen.append(float(out.detach().float().sum()))
        return out


def test_attributes_of_modules_are_as_before() -> None:
    net = Counting(squared)
    handle = train(net, steps=3)
    assert handle.skipped_steps == 3
    assert (net.calls, len(net.seen)) == (3, 4)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        torch.rand(4, generator=generator)
    assert torch.equal(generator.get_state(), net.generator.get_state())
    before = net.calls, len(net.seen), net.generator.get_state()
    handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
    assert (net.calls, len(net.seen)) == before[:2]
    assert torch.equal(net.generator.get_state(), before[2])


class Assigning(Net):
    """Gives its buffers other tensors: one that is None at first, and one that grows."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__(fault)
        self.calls: Tensor
        self.mean: Tensor | None
        self.seen: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        self.seen = torch.cat([self.seen, x.sum().view(1)])
        return super().forward(x + self.mean)


def test_buffers_that_a_model_assigns_are_as_before() -> None:
    def run(traced: bool) -> tuple[Assigning, autoamp.Handle]:
        torch.manual_seed(0)
        net = Assigning(squared)
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
        assert isinstance(handle, autoamp.Handle)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return net, handle

    plain, handle = run(traced=False)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    x = torch.randn(5, 4)
    assert handle.explain_overflow(lambda: mean_square(plain(x))) is not None
    handle.deactivate()
    net, handle = run(traced=True)
    assert [found.op for found in handle.overflows] == ["mul"] * 3
    assert before["calls"] == 3
    for one in (plain, net):
        assert one.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


class Mul(torch.autograd.Function):
    """Is named as an op that lists have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / 0.0


def test_a_function_of_the_program_in_the_loss_is_no_op_of_a_list() -> None:
    def loss(out: Tensor) -> Tensor:
        made: Tensor = Mul.apply(out.half())
        return made.sum(dtype=torch.float32)

    found = found_in(train(Net(), loss=loss))
    assert (found.op, found.phase, found.location) == ("Mul", "backward", line_of(Mul, "/ 0.0"))
    assert found.fp32_names == ()


def test_replays_are_not_counted_or_traced() -> None:
    def calls(traced: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
        assert isinstance(handle, autoamp.Handle)
        net = Net(squared)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with handle.count() as counts, handle.trace() as trace:
            with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert handle.skipped_steps == 1
        handle.deactivate()
        return counts.as_dict(), [(row.op, row.calls, row.casts) for row in trace.rows]

    assert calls(True) == calls(False)


def test_a_graph_that_is_kept_stays_valid() -> None:
    """Buffers that a replay writes and puts back are those that another backward pass needs."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True)
    net = nn.Sequential(nn.BatchNorm1d(4), Net(squared))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept = nn.Linear(4, 4)(torch.randn(5, 4)) * net[0].running_var
    with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
        scaled.backward()
    before = net[0].running_var._version
    optimizer.step()
    assert handle.skipped_steps == 1
    assert net[0].running_var._version == before
    assert kept.requires_grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_flags_that_stay_on_the_device(kind: Any) -> None:
    """A fused optimizer decides by a flag on its device. The first skip is known too late; then flags are read."""
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale="dynamic", trace_overflow=True)
    assert isinstance(handle, autoamp.Handle)
    scaler = runtime_of(handle).optimizers.scalers[0]
    scaler.unread = UnreadFlags(("cpu",))
    active = [False]
    net = Net(lambda h: squared(h) if active[0] else h)
    optimizer = kind(net.parameters(), lr=0.01, fused=True)

    def step(fault: bool) -> None:
        active[0] = fault
        optimizer.zero_grad()
        with handle.scale_loss(mean_square(net(torch.randn(5, 4))) * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for fault in (False, True, False):
        step(fault)
    assert len(scaler.unread) == 3
    assert handle.last_overflow is None
    assert handle.stats["found_inf"] == [1]
    assert (handle.stats["steps"], handle.stats["skipped"], handle.stats["last_step_skipped"]) == (3, 1, False)
    found = found_in(handle)
    assert isinstance(found.verdict, NotLocated)
    assert (found.verdict.watched, found.iteration, found.loss_scale) == (8, None, 65536.0)
    for fault in (False, True):
        step(fault)
        assert len(scaler.unread) == 0
    found = found_in(handle)
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.iteration, found.location) == ("mul", 4, line_of(squared, "big * big"))
    for _ in range(8):
        step(False)
    # By now nothing is watched any more.
    assert len(scaler.unread) > 0
    assert handle.stats["found_inf"] == [2]


@pytest.mark.parametrize("steps", [1, 2])
def test_scale_too_large_in_the_model(steps: int) -> None:
    net = Net(lambda h: h.half().mul(100.0).float())
    found = found_in(train(net, scale="dynamic", steps=steps, loss=lambda out: mean_square(out) * 0.01))
    assert isinstance(found.verdict, ScaleSearch)
    assert found.verdict.finite_at is not None
    assert 1.0 <= found.verdict.finite_at < 65536.0
    assert found.suggestion is None


def test_scale_too_large_at_the_output_and_static() -> None:
    found = found_in(train(Net(), scale=2.0**24))
    assert isinstance(found.verdict, ScaleSearch)
    assert found.suggestion is not None
    assert "dynamic" in found.suggestion


def test_at_one_step_only() -> None:
    active = [False]

    def at_times(h: Tensor) -> Tensor:
        return squared(h) if active[0] else h

    def data(x: Tensor, step: int) -> Tensor:
        active[0] = step == 2
        return x

    handle = train(Net(at_times), steps=5, data=data)
    assert handle.skipped_steps == 1
    found = found_in(handle)
    assert (found.iteration, found.op, found.location) == (2, "mul", line_of(squared, "big * big"))


def test_nan_in_the_data() -> None:
    def data(x: Tensor, step: int) -> Tensor:
        x[3, 1] = float("nan")
        return x

    found = found_in(train(Net(), data=data))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.verdict.batch_index) == ("data", "x", 3)
    assert (found.value, found.op) == ("nan", None)


def test_inf_in_the_fp32_model() -> None:
    found = found_in(train(Net(overflowing_in_fp32)))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert found.verdict.cause == "model"
    assert (found.op, found.module, found.phase) == ("mul", "faulty", "forward")
    assert found.location == line_of(overflowing_in_fp32, "1e30")


def test_intended_infinities_are_not_blamed() -> None:
    assert train(Net(masked)).last_overflow is None
    found = found_in(train(Net(masked_and_squared)))
    assert (found.op, found.location) == ("mul", line_of(squared, "big * big"))


def test_inputs_written_to() -> None:
    net = Net(squared)

    def data(x: Tensor, step: int) -> Tensor:
        kept.append(x)
        return x

    def loss(out: Tensor) -> Tensor:
        kept[-1].zero_()
        return mean_square(out)

    kept: list[Tensor] = []
    # The first layer keeps its input for backward unless its weight is frozen.
    net.first.requires_grad_(False)
    found = found_in(train(net, data=data, loss=loss))
    assert isinstance(found.verdict, NotLocated)
    assert "written to" in found.verdict.why
    assert "not located" in str(found)


@pytest.mark.parametrize("plant", ["clean", "fault"])
def test_it_changes_no_result(plant: str) -> None:
    """Weights, buffers, gradients and random numbers, bitwise, over skipped and taken steps."""

    def run(traced: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = Net(squared if plant == "fault" else (lambda h: h * 64.0))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=traced)
        for _ in range(6):
            optimizer.zero_grad()
            with handle.scale_loss(mean_square(net(torch.randn(5, 4))) * 100.0, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert handle.skipped_steps > 0
        handle.deactivate()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return [*net.state_dict().values(), *gradients, torch.rand(3)]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_o2_and_the_fp16_optimizer() -> None:
    for build in (_with_o2, _with_fp16_optimizer):
        found = build()
        assert isinstance(found.verdict, HalfPrecisionOp), build
        assert (found.op, found.module, found.location) == ("mul", "faulty", line_of(squared, "big * big"))


def _with_o2() -> Overflow:
    net = Net(squared)
    net, optimizer = autoamp.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O2", device_type="cpu", dtype=torch.float16,
        verbosity=0, trace_overflow=True, loss_scale=128.0,
    )  # fmt: skip
    with autoamp.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    handle = current_handle()
    assert handle is not None
    found = found_in(handle)
    handle.deactivate()
    return found


def _with_fp16_optimizer() -> Overflow:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    net = Net(squared)
    optimizer = autoamp.FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), static_loss_scale=128.0)
    optimizer.backward(mean_square(net(torch.randn(5, 4))))
    optimizer.step()
    found = found_in(handle)
    handle.deactivate()
    return found


def test_auto_scale() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    net = Net(squared)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with handle.auto_scale():
        mean_square(net(torch.randn(5, 4))).backward()
        optimizer.step()
    assert (found_in(handle).op, found_in(handle).module) == ("mul", "faulty")


def test_the_error_after_many_skips_carries_it() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    handle.max_consecutive_skips = 2
    net = Net(squared)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    with pytest.raises(NonFiniteGradientsError, match="mul in module faulty") as caught:
        step()
    assert caught.value.overflow is handle.last_overflow


def log_of_zero(h: Tensor) -> Tensor:
    return torch.log(h.float() * 0)


class First(nn.Module):
    """Takes the first of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.module(h)[0]
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.attention(h, h, h)[0]
        return out


@pytest.mark.parametrize(
    "consumer",
    [nn.Linear(8, 4), nn.Dropout(0.5), nn.BatchNorm1d(8), Attention(), First(nn.LSTM(8, 4)), nn.Softmax(-1)],
    ids=lambda module: type(module).__name__,
)
def test_a_logarithm_of_zero_is_blamed_and_not_the_op_that_takes_it(consumer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 8), Faulty(log_of_zero), consumer)
    for found in train(net, steps=2).overflows:
        assert isinstance(found.verdict, NotFiniteInFp32), str(found)
        assert (found.verdict.cause, found.op, found.module, found.phase) == ("model", "log", "1", "forward")
        assert found.location == line_of(log_of_zero, "torch.log")
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    explained = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
    assert explained is not None
    assert (explained.op, explained.location) == ("log", line_of(log_of_zero, "torch.log"))


def test_minus_inf_in_the_data_is_not_blamed_on_the_op_that_takes_it() -> None:
    def data(x: Tensor, step: int) -> Tensor:
        x[2, 0] = float("-inf")
        return x

    found = found_in(train(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), data=data))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.verdict.batch_index) == ("data", "input", 2)


def test_inf_in_the_data_that_no_output_shows() -> None:
    def data(x: Tensor, step: int) -> Tensor:
        x[1, 0] = float("inf")
        return x

    class Reciprocal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return 1.0 / self.layer(x)

    net = Reciprocal()
    found = found_in(train(net, data=data))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.verdict.batch_index) == ("data", "x", 1)
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    x = data(torch.randn(5, 4), 0)
    explained = handle.explain_overflow(lambda: mean_square(net(x)))
    assert explained is not None
    assert explained.verdict == found.verdict


class Steep(torch.autograd.Function):
    """Its backward pass makes inf in any precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.float() * float("inf")


class SteepInHalf(torch.autograd.Function):
    """Its backward pass makes inf in half precision alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient.half() + 1.0) * 60000.0 * 60000.0


@pytest.mark.parametrize("function", [Steep, SteepInHalf])
@pytest.mark.parametrize("whole", [False, True])
def test_a_function_of_the_program_whose_backward_pass_overflows(function: Any, whole: bool) -> None:
    def fault(h: Tensor) -> Tensor:
        out: Tensor = function.apply(h)
        return torch.relu(out).mul(2.0)

    torch.manual_seed(0)
    net = Net(fault)
    if whole:
        handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1.5)
        found = handle.explain_overflow(lambda: mean_square(net(torch.ones(5, 4))))
        assert found is not None
    else:
        found = found_in(train(net, scale=1.5))
    assert isinstance(found.verdict, NotFiniteInFp32 if function is Steep else HalfPrecisionOp), str(found)
    assert (found.op, found.module, found.phase) == (function.__name__, "faulty", "backward")
    assert found.location == line_of(function.backward, "* float" if function is Steep else "* 60000.0")
    assert found.fp32_names == ()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("whole", [False, True])
def test_a_recurrent_layer_on_half_input(kind: Any, whole: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(4, 8)
            self.faulty = Faulty(squared)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.faulty(self.recurrent(x.half())[0])
            return out

    net = Recurrent()
    if whole:
        handle = autoamp.init(device_type="cpu", dtype=torch.float16)
        found = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert found is not None
    else:
        found = found_in(train(net))
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)
    assert (found.op, found.module, found.location) == ("mul", "faulty", line_of(squared, "big * big"))


TAKERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda out, prior: mean_square(out + prior),
    "mul": lambda out, prior: mean_square(out * prior),
    "div": lambda out, prior: mean_square(prior / out),
    "mse_loss": lambda out, prior: F.mse_loss(out.float(), prior.float()),
    "cat": lambda out, prior: mean_square(torch.cat([out, 1.0 * out + prior])),
    "addmm": lambda out, prior: mean_square(torch.addmm(prior, out.half(), torch.eye(4).half())),
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_half_op_between_modules_that_has_no_gradient(name: str) -> None:
    """Of what is outside of the graph nothing is known; the op that takes it is not blamed."""
    weight = torch.full((4, 4), 300.0, dtype=torch.float16)

    def loss(out: Tensor) -> Tensor:
        prior = (out.detach().half().clamp(1.0) + 300.0) @ weight
        return TAKERS[name](out, prior)

    handle = train(Net(), loss=loss, steps=3)
    assert len(handle.overflows) == 3
    for found in handle.overflows:
        if isinstance(found.verdict, NotLocated):
            assert (found.op, found.fp32_names) == (None, ())
            continue
        assert isinstance(found.verdict, HalfPrecisionOp)
        assert (found.op, found.location) == ("matmul", line_of(loss, "@ weight"))


def multiplied_out(h: Tensor) -> Tensor:
    big = h.detach().half() * 0 + 1000.0
    return h + torch.mul(big, big, out=torch.full_like(big, float("nan")))


def copied(h: Tensor) -> Tensor:
    return h + torch.full_like(h, float("nan"), dtype=torch.float16).copy_(squared(h))


def not_seen(h: Tensor) -> Tensor:
    return h + torch.from_numpy(numpy.full(h.shape, numpy.inf, dtype=numpy.float32))


def written_to_half(h: Tensor) -> Tensor:
    big = torch.full_like(h, 1000.0, dtype=torch.float16)
    big *= 1000.0
    return h + big


def test_a_half_tensor_that_is_written_to_is_not_said_to_overflow_in_fp32() -> None:
    """No list makes it fp32, so that running it in fp32 tells nothing."""
    found = found_in(train(Net(written_to_half)))
    assert isinstance(found.verdict, NotLocated)
    assert (found.op, found.location) == ("mul", line_of(written_to_half, "*= 1000.0"))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("fault", "op", "location"),
    [
        (multiplied_out, "mul", line_of(multiplied_out, "torch.mul")),
        (copied, "mul", line_of(squared, "big * big")),
        # No mode sees what is within these: nothing is known of it, nor whether fp32 cures it.
        (not_seen, None, None),
        (torch.vmap(squared), None, None),
    ],
)
def test_what_held_nan_before_it_was_written_and_what_nobody_sees(
    fault: Any, op: str | None, location: str | None, whole: bool
) -> None:
    net = Net(fault)
    if whole:
        handle = autoamp.init(device_type="cpu", dtype=torch.float16)
        found = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert found is not None
    else:
        found = found_in(train(net))
    assert (found.op, found.location) == (op, location), str(found)
    assert isinstance(found.verdict, NotLocated if op is None else HalfPrecisionOp)


def test_a_mask_of_the_model_is_no_weight_that_is_broken() -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__(lambda h: h @ self.mask)
            self.mask: Tensor
            self.register_buffer("mask", torch.zeros(8, 8).fill_(float("-inf")).triu(1))

    found = found_in(train(Masked()))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.op) == ("model", "matmul")


def test_a_function_of_the_program_between_two_modules() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Steep.apply(self.first(x))
            out: Tensor = self.last(made)
            return out

    found = found_in(train(Between()))
    assert (found.op, found.module) == ("Steep", "Between")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_cannot_run_in_fp32(reentrant: bool) -> None:
    """Torch recomputes it as it was computed: whether fp32 would cure it is not known, and where it is from is."""

    def fault(h: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(half_root_of_zero, h, use_reentrant=reentrant)
        return out

    net = Net(fault)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    found = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
    assert found is not None
    assert isinstance(found.verdict, NotLocated)
    assert found.op == (None if reentrant else "sqrt")
    assert "raised" in found.verdict.why


# -- on demand --


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("fault", "op", "kind"),
    [
        (squared, "mul", HalfPrecisionOp),
        (doubled, "linear", HalfPrecisionOp),
        (root_of_zero, "sqrt", NotFiniteInFp32),
        (overflowing_in_fp32, "mul", NotFiniteInFp32),
    ],
)
def test_explain(fault: Any, op: str, kind: type, whole: bool) -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    net, x = Net(fault), torch.randn(5, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [value.clone() for value in net.state_dict().values()]
    random = torch.get_rng_state()

    def step() -> Tensor | None:
        loss = mean_square(net(x))
        if not whole:
            return loss
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        raise AssertionError("the step is to end at the optimizer")

    found = handle.explain_overflow(step)
    assert found is not None
    assert isinstance(found.verdict, kind)
    assert (found.op, found.module) == (op, "faulty")
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())
    assert runtime_of(handle).optimizers.counts.steps == 0


def test_explain_a_loss_exactly() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    net, x = Net(), torch.randn(5, 4)

    def step() -> Tensor:
        return (net(x).float() * 1e30).pow(2).sum()

    found = handle.explain_overflow(step)
    assert found is not None
    assert (found.op, found.location) == ("pow", line_of(step, "pow(2)"))
    assert handle.explain_overflow(lambda: mean_square(net(x))) is None
    with pytest.raises(UsageError, match="within a step"):
        handle.explain_overflow(lambda: handle.explain_overflow(step))


# -- two ranks --

WORKER = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
import autoamp

dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        out = self.layer(x)
        return out.half() * 1e6 if self.bad else out

torch.manual_seed(0)
handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True)
net = Net()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    net.bad = rank == 1 and step == 1
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().pow(2).mean()
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
told = [handle.skipped_steps, handle.last_overflow.to_dict()]
handle.deactivate()
# Now one rank does not trace.
handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=rank == 0)
for step in range(4):
    net.bad = rank == 1 and step > 1
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().pow(2).mean()
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
told += [handle.skipped_steps, handle.last_overflow and handle.last_overflow.to_dict()]
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""


def test_on_one_of_two_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe, contextlib.closing(probe):
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    workers = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(autoamp.__file__).parents[1]),
        }  # fmt: skip
        workers.append(subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment))
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    clean, faulty = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (clean[0], faulty[0]) == (1, 1)
    assert clean[1]["verdict"] == {"type": Communication.__name__}
    assert clean[1]["iteration"] == 1
    assert faulty[1]["kind"] == "half_precision_op"
    assert (faulty[1]["op"], faulty[1]["phase"]) == ("mul", "forward")
    assert faulty[1]["location"] == f"{script}:16"
    assert (clean[2], faulty[2]) == (2, 2)
    # It was not asked to trace, and looks on since its first skip.
    assert faulty[3]["location"] == f"{script}:16"
    assert clean[3]["kind"] == "communication"


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cross_entropy(out: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), torch.zeros(8, dtype=torch.long))


def operators_of_step(layers: int, loss: Callable[[Tensor], Tensor], *, traced: bool) -> int:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
    x = torch.randn(2, 4, 16)

    def step() -> None:
        optimizer.zero_grad()
        with handle.scale_loss(loss(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(12):
        step()
    with Operators() as operators:
        step()
    assert handle.skipped_steps == 0
    handle.deactivate()
    return operators.count


@pytest.mark.parametrize("loss", [cross_entropy, mean_square])
def test_what_a_clean_step_costs_more(loss: Callable[[Tensor], Tensor]) -> None:
    more = [
        operators_of_step(layers, loss, traced=True) - operators_of_step(layers, loss, traced=False)
        for layers in (1, 3)
    ]
    # None for the modules within the model: inputs, outputs and the loss without their graph, and sums of outputs.
    assert more[0] == more[1]
    assert 0 < more[0] <= 4
