"""Planted faults: verdict, op, module and line of each, and that looking on changes no result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import autoamp
from autoamp.diagnostics import (
    Communication,
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    ScaleSearch,
)
from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.runtime import current_handle, current_runtime, runtime_of
from autoamp.scaling import DynamicLossScaler, UnreadFlags
from tests.launches import launched


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


def thousandfold(out: Tensor) -> Tensor:
    return (out.float() * 1000.0).sum()


def started(scale: Any = 256.0, *, traced: bool = True, **settings: Any) -> Any:
    """Return a handle that casts to fp16 on the CPU."""
    return autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=scale, trace_overflow=traced, **settings)


def take_step(
    handle: Any,
    net: Callable[[Tensor], Tensor],
    optimizer: Any,
    loss: Callable[[Tensor], Tensor] = mean_square,
    x: Tensor | None = None,
) -> None:
    optimizer.zero_grad()
    with handle.scale_loss(loss(net(torch.randn(5, 4) if x is None else x)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def train(
    net: nn.Module,
    *,
    scale: Any = 256.0,
    steps: int = 1,
    loss: Callable[[Tensor], Tensor] = mean_square,
    data: Callable[[Tensor, int], Tensor] = lambda x, step: x,
    **settings: Any,
) -> autoamp.Handle:
    handle: autoamp.Handle = started(scale, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = data(torch.randn(5, 4, generator=generator), step)
        take_step(handle, net, optimizer, loss, x)
    return handle


def found_in(handle: autoamp.Handle) -> Overflow:
    found = handle.last_overflow
    assert found is not None
    values = found.to_dict()
    assert values["kind"] == found.kind
    assert json.loads(json.dumps(values)) == values
    return found


def found_by(
    net: nn.Module, on_demand: bool, loss: Callable[[Tensor], Tensor] = mean_square, scale: float = 256.0
) -> Overflow:
    """Return what is found in a skipped step, or by `explain_overflow`."""
    if not on_demand:
        return found_in(train(net, scale=scale, loss=loss))
    handle = started(scale, traced=False)
    found: Overflow | None = handle.explain_overflow(lambda: loss(net(torch.randn(5, 4))))
    handle.deactivate()
    assert found is not None
    return found


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines, start=first) if text in line)
    return f"{os.path.relpath(str(inspect.getsourcefile(function)))}:{number}"


# -- faults in a module --


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


def log_of_zero(h: Tensor) -> Tensor:
    return torch.log(h.float() * 0)


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


def steep(h: Tensor) -> Tensor:
    return torch.relu(Steep.apply(h)).mul(2.0)  # type: ignore[no-untyped-call]


def steep_function_in_half(h: Tensor) -> Tensor:
    return torch.relu(SteepInHalf.apply(h)).mul(2.0)  # type: ignore[no-untyped-call]


class Fault(NamedTuple):
    """A function of activations that overflows, and what is to be found."""

    function: Callable[[Tensor], Tensor]
    verdict: type
    op: str | None
    line: str | None
    phase: str = "forward"
    in_cast: bool = False
    scale: float = 256.0
    loss: Callable[[Tensor], Tensor] = mean_square


BIG_TIMES_BIG = line_of(squared, "big * big")
FAULTS = {
    "a product": Fault(squared, HalfPrecisionOp, "mul", BIG_TIMES_BIG),
    "a cast for an op": Fault(doubled, HalfPrecisionOp, "linear", line_of(doubled, "F.linear"), in_cast=True),
    "a gradient": Fault(
        steep_in_half, HalfPrecisionOp, "mul", line_of(steep_in_half, "mul(500.0)"), "backward", scale=1.5,
        loss=thousandfold,
    ),
    "a gradient in fp32": Fault(root_of_zero, NotFiniteInFp32, "sqrt", line_of(root_of_zero, "sqrt"), "backward"),
    "fp32": Fault(overflowing_in_fp32, NotFiniteInFp32, "mul", line_of(overflowing_in_fp32, "1e30")),
    # Infinities on purpose are not blamed.
    "beside a mask": Fault(masked_and_squared, HalfPrecisionOp, "mul", BIG_TIMES_BIG),
    # What held nan before it was written.
    "out=": Fault(multiplied_out, HalfPrecisionOp, "mul", line_of(multiplied_out, "torch.mul")),
    "copied": Fault(copied, HalfPrecisionOp, "mul", BIG_TIMES_BIG),
    "in place": Fault(written_to_half, HalfPrecisionOp, "mul", line_of(written_to_half, "*= 1000.0")),
    # No operator made it.
    "numpy": Fault(not_seen, NotLocated, None, None),
    "vmap": Fault(torch.vmap(squared), HalfPrecisionOp, "mul", BIG_TIMES_BIG),
    "a function": Fault(steep, NotFiniteInFp32, "Steep", line_of(Steep.backward, "* float"), "backward", scale=1.5),
    "a function in half": Fault(
        steep_function_in_half, HalfPrecisionOp, "SteepInHalf", line_of(SteepInHalf.backward, "* 60000.0"), "backward",
        scale=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_module(name: str, on_demand: bool) -> None:
    fault = FAULTS[name]
    found = found_by(Net(fault.function), on_demand, fault.loss, fault.scale)
    assert isinstance(found.verdict, fault.verdict), str(found)
    assert (found.op, found.location, found.phase) == (fault.op, fault.line, fault.phase)
    assert found.module == (None if fault.op is None else "faulty")
    assert getattr(found.verdict, "in_cast", False) is fault.in_cast
    if fault.phase == "backward":
        # The module after it has finite gradients.
        assert found.parameter is not None
        assert found.parameter.startswith(("first", "norm"))
    if "Steep" in str(fault.op):
        assert found.fp32_names == ()


def test_all_fields_of_a_finding() -> None:
    # A rule on another name of the op changes nothing: torch looks `Tensor.mul` up for `y * y`.
    for lists in ({}, {"lists": {"fp32": ["mul"]}}):
        found = found_in(train(Net(squared), **lists))
        assert isinstance(found.verdict, HalfPrecisionOp)
        assert found.value == "inf"
        # The product is too large for the next layer as well.
        expected = 'add fp32 = ["__mul__", "__rmul__", "linear"] to the list file (tried)'
        assert (found.suggestion, found.fp32_names) == (expected, ("__mul__", "__rmul__", "linear"))
        assert max(found.verdict.magnitudes) > 256
        assert (found.iteration, found.loss_scale, found.kind) == (0, 256.0, "half_precision_op")


def log_of_rounded(h: Tensor) -> Tensor:
    """1e-10 is 0 in half precision, and log runs in fp32."""
    p = h.half().mul(0.0).sub(60.0).sigmoid()
    return h + 1e-3 * (p + 1e-10).log()


def big_in_fp32(h: Tensor) -> Tensor:
    return h + 1e-9 * (h.detach().half().clamp(1e3, 1e3) * 1000.0).sum(dtype=torch.float32)


def test_an_entry_is_tried_on_the_tape() -> None:
    found = found_in(train(Net(big_in_fp32)))
    assert 'add fp32 = ["__mul__", "__rmul__"] to the list file (tried)' in str(found.suggestion)


def test_an_entry_that_is_in_force_is_not_suggested() -> None:
    found = found_in(train(Net(log_of_rounded)))
    assert (found.kind, found.op) == ("half_precision_op", "log")
    assert "log" not in found.fp32_names
    assert '"log"' not in str(found.suggestion)
    assert found.fp32_names
    assert "(tried)" in str(found.suggestion)
    handle = train(Net(log_of_rounded), lists={"fp32": list(found.fp32_names)})
    assert handle.last_overflow is None


def test_intended_infinities_are_not_blamed() -> None:
    assert train(Net(masked)).last_overflow is None


BIG: dict[str, Callable[[Tensor], Tensor]] = {
    "__mul__": lambda h: h * h,
    "Tensor.mul": lambda h: h.mul(h),
    "multiply": lambda h: h.multiply(h),
    "__rsub__": lambda h: 6e4 - h.clamp(-6e4, -6e4),
    "__truediv__": lambda h: h.clamp(6e4, 6e4) / h.clamp(0.01, 0.01),
    "__rpow__": lambda h: 1e4 ** h.clamp(2.0, 2.0),
    "__matmul__": lambda h: h @ h.clamp(500.0, 500.0).T,
    "__imul__": lambda h: operator.imul(h.clone(), h),
    "mul_": lambda h: h.clone().mul_(h),
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
    assert json.dumps(found.fp32_names) in str(found.suggestion)
    if name in ("__imul__", "mul_"):
        assert "write it out of place" in str(found.suggestion)
        return
    rest = [op for op in alone if op not in found.fp32_names]
    handle = train(Net(fault), lists={"fp32": list(found.fp32_names), "none": rest})
    assert handle.last_overflow is None
    assert not handle.last_step_skipped


BIG_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "__mul__": lambda h: h * 500.0,
    "div": lambda h: torch.div(h, 0.002),
    "__matmul__": lambda h: h @ (500.0 * torch.eye(8)).half(),
    "linear": lambda h: F.linear(h, (500.0 * torch.eye(8)).half()),
}


def with_unit_weight(net: Net) -> Net:
    """Let the last layer pass gradients as they are."""
    with torch.no_grad():
        net.last.weight.copy_(torch.eye(4, 8))
    return net


@pytest.mark.parametrize("name", BIG_BACKWARD)
def test_the_suggested_entry_avoids_an_overflow_of_the_backward_pass(name: str) -> None:
    """Gradients of 1000 that an op multiplies by 500, of activations that are small enough in the forward pass."""

    def net() -> Net:
        torch.manual_seed(0)
        return with_unit_weight(Net(lambda h: BIG_BACKWARD[name](h.half() * 0.001)))

    found = found_by(net(), False, thousandfold, 1.0001)
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)
    assert (found.phase, found.module) == ("backward", "faulty")
    assert json.dumps(found.fp32_names) in str(found.suggestion)
    on_demand = found_by(net(), True, thousandfold, 1.0001)
    assert (on_demand.op, set(on_demand.fp32_names)) == (found.op, set(found.fp32_names))
    handle = train(net(), scale=1.0001, loss=thousandfold, lists={"fp32": list(found.fp32_names)})
    assert handle.last_overflow is None
    assert not handle.last_step_skipped


def test_a_gradient_that_no_list_can_help_is_said_to_be_so() -> None:
    def fault(h: Tensor) -> Tensor:
        half = (h.float() * 0.001).half()
        return torch.mul(half, 500.0)

    found = found_by(with_unit_weight(Net(fault)), False, thousandfold, 1.0001)
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert found.fp32_names == ()
    assert f"make no half tensor at {line_of(fault, '.half()')}" in str(found.suggestion)
    # A gradient that the loss makes too large for the model's output.
    found = found_in(train(Net(), scale=1.0001, loss=lambda out: (out.float() * 1e6).sum(), steps=2))
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.fp32_names) == ("float", ())
    assert "make the loss smaller" in str(found.suggestion)


def cast_by_the_program(h: Tensor) -> Tensor:
    return (h.float() * 1e6).half()


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (cast_by_the_program, "compute it in fp32"),
        (overflowing_in_fp32, "in a form that stays finite"),
        (root_of_zero, "in a form that stays finite"),
    ],
)
def test_a_finding_without_an_entry_has_a_suggestion(fault: Callable[[Tensor], Tensor], advice: str) -> None:
    found = found_in(train(Net(fault)))
    assert advice in str(found.suggestion)
    assert found.fp32_names == ()


@pytest.mark.parametrize("in_module", [False, True])
def test_a_gradient_that_overflows_in_bf16_alone_is_said_to_do_so(in_module: bool) -> None:
    """The largest values are 3.390e38 in bf16 and 3.403e38 in fp32."""
    net = nn.Sequential(nn.Linear(4, 4), Faulty(lambda h: h.bfloat16().float() if in_module else h.bfloat16()))
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, loss_scale=1.0001, trace_overflow=True)
    take_step(
        handle, net, torch.optim.SGD(net.parameters(), lr=0.1), lambda out: (out.float() * 3.399e38).sum(),
        torch.full((1, 4), 0.01),
    )  # fmt: skip
    found = found_in(handle)
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)
    assert (found.phase, found.verdict.dtype) == ("backward", "bfloat16")


# -- models --


class First(nn.Module):
    """Takes the first result of a module that is called with several times the same."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.module(*[h] * self.times)[0]
        return out


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return out


class Masked(Net):
    """Has a mask that is -inf on purpose: it is no weight that is broken."""

    def __init__(self) -> None:
        super().__init__(lambda h: h @ self.mask)
        self.mask: Tensor
        self.register_buffer("mask", torch.zeros(8, 8).fill_(float("-inf")).triu(1))


class Between(nn.Module):
    """Calls a function of the program between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Steep.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


class Recurrent(nn.Module):
    """A recurrent layer on half input, before a fault."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent = kind(4, 8, num_layers=2, dropout=0.5, bidirectional=True)
        self.faulty = Faulty(squared)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.faulty(self.recurrent(x.half())[0] * 30.0)
        return out


def after_log(consumer: nn.Module) -> nn.Module:
    """Return a model with a log of 0, whose -inf a module takes."""
    return nn.Sequential(nn.Linear(4, 8), Faulty(log_of_zero), consumer)


LOG = (NotFiniteInFp32, "log", "1", line_of(log_of_zero, "torch.log"))
MUL = (HalfPrecisionOp, "mul", "faulty", BIG_TIMES_BIG)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[type, str, str, str]]] = {
    "log and linear": (lambda: after_log(nn.Linear(8, 4)), LOG),
    "log and dropout": (lambda: after_log(nn.Dropout(0.5)), LOG),
    "log and norm": (lambda: after_log(nn.BatchNorm1d(8)), LOG),
    "log and attention": (lambda: after_log(First(nn.MultiheadAttention(8, 2), 3)), LOG),
    "log and lstm": (lambda: after_log(First(nn.LSTM(8, 4), 1)), LOG),
    "log and softmax": (lambda: after_log(nn.Softmax(-1)), LOG),
    "lstm": (lambda: Recurrent(nn.LSTM), MUL),
    "gru": (lambda: Recurrent(nn.GRU), MUL),
    "rnn": (lambda: Recurrent(nn.RNN), MUL),
    "checkpoint": (lambda: Checkpointed(squared), MUL),
    "mask": (Masked, (NotFiniteInFp32, "matmul", "faulty", line_of(Masked, "@ self.mask"))),
    "function": (Between, (NotFiniteInFp32, "Steep", "Between", line_of(Steep.backward, "* float"))),
}


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_fault_in_a_model(name: str, on_demand: bool) -> None:
    make, expected = MODELS[name]
    found = found_by(make(), on_demand)
    assert (type(found.verdict), found.op, found.module, found.location) == expected, str(found)
    # What a checkpoint computes again is no call of the program.
    run = current_runtime()
    assert on_demand or (run is not None and len(run.overflows.recorder.step.calls) == 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_within_a_checkpoint(reentrant: bool) -> None:
    """`torch.autograd.grad` raises for a reentrant one."""

    def fault(h: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(half_root_of_zero, h, use_reentrant=reentrant)
        return out

    found = found_by(Net(fault), on_demand=True)
    if reentrant:
        assert isinstance(found.verdict, NotLocated)
        assert "raised" in found.verdict.why
    else:
        assert isinstance(found.verdict, NotFiniteInFp32)
        assert (found.op, found.location) == ("sqrt", line_of(half_root_of_zero, "sqrt"))


class Reciprocal(nn.Module):
    """Gives finite outputs for an input that holds inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 / self.layer(x)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize(
    ("make", "value", "row", "name"),
    [
        (Net, "nan", 3, "x"),
        (Reciprocal, "inf", 1, "x"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "-inf", 2, "input"),
    ],
)
def test_inf_and_nan_in_the_data(make: Any, value: str, row: int, name: str, on_demand: bool) -> None:
    net, x = make(), torch.randn(5, 4)
    x[row, 0] = float(value)
    if on_demand:
        found = started(traced=False).explain_overflow(lambda: mean_square(net(x)))
    else:
        found = train(net, data=lambda _, step: x).last_overflow
    assert found is not None
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.verdict.batch_index) == ("data", name, row)
    assert (found.value, found.op) == (value.removeprefix("-"), None)


def test_minus_inf_in_the_data_that_makes_no_nan() -> None:
    x = torch.randn(5, 4)
    x[2, 0] = float("-inf")
    found = found_in(train(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), data=lambda _, step: x))
    assert isinstance(found.verdict, NotFiniteInFp32)


def test_a_weight_that_holds_nan() -> None:
    net = Net()
    with torch.no_grad():
        net.first.weight[2, 1] = float("nan")
    found = found_in(train(net))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.module) == ("weights", "first.weight", "first")


# -- faults in a loss --


class Clone(torch.autograd.Function):
    """Is named as an op of torch's whose gradients nobody looks at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * float("inf")


class Mul(torch.autograd.Function):
    """Is named as an op that lists have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / 0.0


def exp_of_large(out: Tensor) -> Tensor:
    return out.float().mul(1000.0).abs().exp().mul(1e20).mean()


def cubed_in_half(out: Tensor) -> Tensor:
    big = 512.0 * (out.half() + 1.0)
    return (big * big * big).sum(dtype=torch.float32) * 1e-9


def erfinv_of_one(out: Tensor) -> Tensor:
    return (out.half().mul(0.0) + 1.0).erfinv().sum(dtype=torch.float32)


def exp_after_half_ops(out: Tensor) -> Tensor:
    return ((out.half() + 20.0) + 1.0).exp().sum(dtype=torch.float32)


def steep_for_large_scales(out: Tensor) -> Tensor:
    return (out.float().abs() * 1e30).mean()


def steep_at_any_scale(out: Tensor) -> Tensor:
    return (out.float() * 0).abs().sqrt().mean()


def cloned(out: Tensor) -> Tensor:
    return Clone.apply(out.float()).abs().mean()  # type: ignore[no-untyped-call,no-any-return]


def multiplied(out: Tensor) -> Tensor:
    made: Tensor = Mul.apply(out.half())  # type: ignore[no-untyped-call]
    return made.sum(dtype=torch.float32)


LOSSES = {
    "fp32": Fault(exp_of_large, NotFiniteInFp32, "exp", line_of(exp_of_large, "exp()")),
    "half": Fault(cubed_in_half, HalfPrecisionOp, "mul", line_of(cubed_in_half, "big * big")),
    "after half ops": Fault(erfinv_of_one, NotFiniteInFp32, "erfinv", line_of(erfinv_of_one, "erfinv()")),
    "of half ops": Fault(exp_after_half_ops, HalfPrecisionOp, "exp", line_of(exp_after_half_ops, "exp()")),
    "scale": Fault(
        steep_for_large_scales, ScaleSearch, "mul", line_of(steep_for_large_scales, "1e30"), "backward", scale=2.0**40
    ),
    "no scale": Fault(
        steep_at_any_scale, NotFiniteInFp32, "sqrt", line_of(steep_at_any_scale, "sqrt()"), "backward"
    ),
    # Functions of the program that are named as ops.
    "Clone": Fault(cloned, NotFiniteInFp32, "Clone", line_of(Clone, "float"), "backward"),
    "Mul": Fault(multiplied, object, "Mul", line_of(Mul, "/ 0.0"), "backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_fault_in_the_loss(name: str) -> None:
    fault = LOSSES[name]
    lists = {} if name in ("fp32", "half", "Clone", "Mul") else {"lists": {"extends": []}}
    handle = train(Net(), loss=fault.function, steps=2, scale=fault.scale, **lists)
    for found in handle.overflows:
        assert isinstance(found.verdict, fault.verdict), str(found)
        assert (found.op, found.phase, found.location) == (fault.op, fault.phase, fault.line)
        if name in ("Clone", "Mul"):
            assert found.fp32_names == ()
    assert len(handle.overflows) == 2
    if name == "half":
        # What is suggested avoids it.
        assert "__mul__" in str(found.suggestion)
        lists = {"lists": {"extends": ["default"], "fp32": list(found.fp32_names)}}
        assert train(Net(), loss=fault.function, **lists).last_overflow is None


def test_explain_a_loss_exactly() -> None:
    handle = started(traced=False)
    net, x = Net(), torch.randn(5, 4)

    def step() -> Tensor:
        return (net(x).float() * 1e30).pow(2).sum()

    found = handle.explain_overflow(step)
    assert (found.op, found.location) == ("pow", line_of(step, "pow(2)"))
    assert handle.explain_overflow(lambda: mean_square(net(x))) is None


@pytest.mark.parametrize("traced", [True, False])
def test_a_scale_that_a_half_loss_cannot_hold_is_a_search(traced: bool) -> None:
    """The gradient of the loss is inf, and 0 times it is nan, before any op of the program has run backward."""
    handle = started(traced=traced)
    net = nn.Linear(4, 4).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.01), dynamic_loss_scale=True)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward((net(torch.randn(5, 4).half()) * torch.tensor([0.0, 1.0, 1.0, 1.0]).half()).mean())
        optimizer.step()
    assert optimizer.loss_scaler.loss_scale == 2.0**15
    assert [found.kind for found in handle.overflows] == ["scale_search"] * traced


REFUSED = {
    "scale_loss": "scaled a loss", "FP16_Optimizer": "scaled a loss", "GradScaler": "scaled a loss",
    "backward": "ran a backward pass", "step": "called an optimizer", "closure": "called an optimizer",
    "nested": r"called explain_overflow\(\)",
    "None": "returned None", "float": "returned a float",
    "no graph": "returned a Tensor", "several": "returned a Tensor",
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_explain_takes_a_loss_before_its_backward_pass(way: str) -> None:
    """What else is given is refused, and changes nothing."""
    handle, net = started(None, traced=False), Net()
    optimizer: Any = (torch.optim.LBFGS if way == "closure" else torch.optim.SGD)(net.parameters(), lr=0.1)
    if way == "FP16_Optimizer":
        optimizer = FP16_Optimizer(optimizer)
    # Times the loss scale these would be inf.
    for param in net.parameters():
        param.grad = torch.full_like(param, 1e35)
    before, scale = [param.clone() for param in net.parameters()], handle.loss_scale
    returned: dict[str, Any] = {
        "None": lambda loss: None, "float": Tensor.item,
        "no graph": Tensor.detach, "several": lambda loss: loss.expand(2),
    }  # fmt: skip

    def step() -> Any:
        loss = mean_square(net(torch.randn(5, 4)))
        if way in returned:
            return returned[way](loss)
        if way == "scale_loss":
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        elif way == "FP16_Optimizer":
            optimizer.backward(loss)
        elif way == "GradScaler":
            torch.amp.GradScaler("cpu").scale(loss).backward()
        elif way == "nested":
            handle.explain_overflow(step)
        elif way == "backward":
            loss.backward()
        else:
            optimizer.step(*([lambda: loss] if way == "closure" else []))
        return loss

    with pytest.raises(UsageError, match=rf"returns the loss before its backward pass, .* this one {REFUSED[way]}"):
        handle.explain_overflow(step)
    assert all(map(torch.equal, net.parameters(), before))
    assert all(bool((param.grad == 1e35).all()) for param in net.parameters() if param.grad is not None)
    assert (handle.loss_scale, handle.stats["steps"], handle.stats["skipped"]) == (scale, 0, 0)
    take_step(handle, net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert (handle.stats["steps"], handle.last_step_skipped) == (1, False)


def test_another_thread_trains_while_a_loss_is_explained() -> None:
    handle, net, other = started(traced=False), Net(), Net()

    def step() -> Tensor:
        thread = threading.Thread(target=lambda: mean_square(other(torch.randn(5, 4))).backward())
        thread.start()
        thread.join()
        return mean_square(net(torch.randn(5, 4)))

    assert handle.explain_overflow(step) is None
    assert all(param.grad is not None for param in other.parameters())


def test_explain_between_forward_and_loss_leaves_the_watch_of_the_step() -> None:
    handle, net = started(64.0), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    out = net(torch.randn(5, 4))
    assert handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4)))) is None
    with handle.scale_loss((out.float() * 1e30).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert handle.last_overflow is not None
    assert handle.last_overflow.op == "pow"


def modes() -> int:
    """Return how many modes of any kind intercept calls."""
    return len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack())


@pytest.mark.parametrize("traced", [True, False])
def test_steps_that_are_recorded(traced: bool) -> None:
    """All of a traced run; else those after a skip."""
    seen = []

    def loss(out: Tensor) -> Tensor:
        seen.append(len(_get_current_dispatch_mode_stack()) > 0)
        return mean_square(out)

    train(Net(squared), loss=loss, steps=3, traced=traced)
    assert seen == [traced, True, True]
    assert modes() == 0


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
    assert modes() == 0


@pytest.mark.parametrize("when", ["before the handle", "after the handle", "after a step"])
@pytest.mark.parametrize("what", ["model", "loss", "part"])
def test_compiled_code_runs_as_without(what: str, when: str) -> None:
    """No mode is on, so that Dynamo makes one graph and each call runs it; modes would break it."""
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (runs.append(1), graph(*args))[1]

    def begin(net: Net) -> Any:
        if what == "part":
            net.faulty.compile(backend=backend, fullgraph=True)
            return net, mean_square
        compiled = torch.compile(mean_square if what == "loss" else net, backend=backend, fullgraph=True)
        return (net, compiled) if what == "loss" else (compiled, mean_square)

    torch._dynamo.reset()
    net = Net(lambda h: h * 2.0)
    model, loss = begin(net) if when == "before the handle" else (net, mean_square)
    handle = started()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if when == "after a step":
        take_step(handle, net, optimizer)
    if when != "before the handle":
        model, loss = begin(net)
    for _ in range(3):
        take_step(handle, model, optimizer, loss)
    assert len(runs) == 3
    assert handle.skipped_steps == 0


def test_a_stack_trace_of_a_call_has_two_frames_of_the_package() -> None:
    def fault(h: Tensor) -> Tensor:
        raise ValueError

    handle, net = started(), Net(fault)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        net(torch.randn(5, 4))
    files = [str(entry.path) for entry in caught.traceback]
    package = str(Path(autoamp.__file__).parent)
    of_the_model = files[: next(i for i, entry in enumerate(caught.traceback) if entry.name == "forward")]
    assert sum(file.startswith(package) for file in of_the_model) == 2
    # The call that raised has ended.
    net.faulty.fault = squared
    take_step(handle, net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert found_in(handle).module == "faulty"


def test_what_is_watched_ends_with_the_handle() -> None:
    handle = started()
    out = Net()(torch.randn(5, 4))
    assert out.requires_grad
    assert modes() == 2
    handle.deactivate()
    assert modes() == 0


@pytest.mark.parametrize("scale", [4e5, DynamicLossScaler(4e5)], ids=["static", "dynamic"])
def test_a_cast_after_a_cross_entropy_that_a_lower_scale_mends(scale: Any) -> None:
    """At one step a gradient of 80000 is to be half."""

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
    assert (found.iteration, found.kind) == (4, "scale_search")
    assert ("use loss_scale=" in str(found)) is (scale == 4e5)


def test_nan_of_a_cross_entropy_whose_loss_is_finite() -> None:
    """A row that is ignored: its gradient of 0 times what is not finite is nan."""
    offset = torch.zeros(5, 4)

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out.float() + offset, torch.tensor([0, 1, -100, 2, 3]))

    def data(x: Tensor, step: int) -> Tensor:
        offset[2] = float("-inf") if step in (3, 4) else 0.0
        return x

    overflows = train(Net(), loss=loss, data=data, steps=6).overflows
    assert [found.iteration for found in overflows] == [3, 4]
    for found in overflows:
        assert isinstance(found.verdict, NotFiniteInFp32)
        assert (found.op, found.phase, found.value) == ("cross_entropy", "forward", "nan")
        assert found.location == line_of(loss, "cross_entropy")


def test_a_program_that_writes_to_the_outputs_of_its_model() -> None:
    """What they were before is kept."""

    def loss(out: Tensor) -> Tensor:
        return mean_square(out.mul_(3.0))

    handle = train(Net(squared), loss=loss, steps=2)
    found = found_in(handle)
    assert (found.op, found.module, found.location) == ("mul", "faulty", line_of(squared, "big * big"))
    assert [one.location for one in handle.overflows] == [found.location] * 2


# -- what is not blamed --


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


def test_two_passes_through_one_output() -> None:
    """The gradients of the second pass are not those of the first, which overflowed."""
    handle = started(2.0**14)
    net = Net(lambda h: h.half().mul(100.0).float())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    out = net(torch.randn(5, 4))
    for factor in (1.0, 1e-4):
        with handle.scale_loss(mean_square(out) * factor, optimizer) as scaled:
            scaled.backward(retain_graph=True)
    optimizer.step()
    assert isinstance(found_in(handle).verdict, ScaleSearch)


def test_a_scale_that_is_too_large() -> None:
    net = Net(lambda h: h.half().mul(100.0).float())
    found = found_in(train(net, scale="dynamic", steps=2, loss=lambda out: mean_square(out) * 0.01))
    assert isinstance(found.verdict, ScaleSearch)
    assert found.verdict.finite_at is not None
    assert 1.0 <= found.verdict.finite_at < 65536.0
    assert found.suggestion is None
    # Static, and too large at the output.
    found = found_in(train(Net(), scale=2.0**24))
    assert isinstance(found.verdict, ScaleSearch)
    assert "dynamic" in str(found.suggestion)


# -- what looking on leaves behind --


class Stateful(Net):
    """Writes attributes and buffers, of which one is None at first, and draws from a generator of its own."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__(fault)
        self.calls, self.seen, self.generator = 0, [0.0], torch.Generator().manual_seed(3)
        self.mean: Tensor | None
        self.sums: Tensor
        self.register_buffer("mean", None)
        self.register_buffer("sums", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        self.sums = torch.cat([self.sums, x.sum().view(1)])
        return super().forward(x + self.mean + torch.rand(4, generator=self.generator) * 1e-6)

    def state(self) -> list[Tensor]:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        generators = [self.generator.get_state(), torch.get_rng_state()]
        return [*self.state_dict().values(), *gradients, *generators, torch.tensor([self.calls, *self.seen])]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fault", [squared, lambda h: h * 64.0])
def test_it_changes_no_result(fault: Callable[[Tensor], Tensor]) -> None:
    """Weights, buffers, attributes, gradients and random numbers, bitwise, over skipped and taken steps."""

    def run(traced: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = Stateful(fault)
        optimizer, handle = torch.optim.Adam(net.parameters(), lr=0.01), started(None, traced=traced)

        def step() -> None:
            take_step(handle, net, optimizer, lambda out: mean_square(out) * 100.0)

        for _ in range(6):
            step()
        assert handle.skipped_steps > 0
        result = net.state()
        optimizer.zero_grad()
        before, steps = net.state(), runtime_of(handle).optimizers.counts.steps
        found = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))) * 100.0)
        assert fault is not squared or found.location == BIG_TIMES_BIG
        assert are_equal(net.state(), before)
        assert runtime_of(handle).optimizers.counts.steps == steps
        if traced and fault is squared:
            assert [one.location for one in handle.overflows] == [BIG_TIMES_BIG] * 6
        handle.deactivate()
        return result

    assert are_equal(run(True), run(False))


def test_looking_on_is_not_counted_or_traced() -> None:
    def calls(traced: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        handle, net = started(64.0, traced=traced), Net(squared)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with handle.count() as counts, handle.trace() as trace:
            take_step(handle, net, optimizer)
            handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert handle.skipped_steps == 1
        handle.deactivate()
        return counts.as_dict(), [(row.op, row.calls, row.casts) for row in trace.rows]

    assert calls(True) == calls(False)


def test_a_graph_that_is_kept_stays_valid() -> None:
    """Buffers that a replay writes and puts back are those that another backward pass needs."""
    handle = started(64.0)
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


def test_inputs_written_to() -> None:
    net, x = Net(squared), torch.randn(5, 4)
    # The first layer keeps its input for backward unless its weight is frozen.
    net.first.requires_grad_(False)
    found = found_in(train(net, data=lambda _, step: x, loss=lambda out: mean_square(out) + 0.0 * x.zero_().sum()))
    assert (found.kind, found.op, found.location) == ("half_precision_op", "mul", BIG_TIMES_BIG)
    assert not x.any()


# -- steps of all kinds --


def test_a_fault_that_comes_and_goes_in_a_model_that_draws_numbers() -> None:
    step = [0]

    def fault(h: Tensor) -> Tensor:
        drawn = F.dropout(h, 0.5) * random.uniform(0.5, 2.0) * numpy.random.uniform(0.5, 2.0)
        return squared(drawn) if step[0] in (8, 9) else drawn

    def data(x: Tensor, number: int) -> Tensor:
        step[0] = number
        return x

    found = train(Net(fault), data=data, steps=10).overflows
    assert [(one.iteration, one.kind, one.location) for one in found] == [
        (8, "half_precision_op", BIG_TIMES_BIG), (9, "half_precision_op", BIG_TIMES_BIG),
    ]  # fmt: skip


def test_flags_that_stay_on_the_device() -> None:
    """A fused optimizer decides by a flag on its device. The first skip is known too late; then flags are read."""
    handle = started("dynamic")
    scaler = runtime_of(handle).optimizers.scalers[0]
    scaler.unread = UnreadFlags(("cpu",))
    active = [False]
    net = Net(lambda h: squared(h) if active[0] else h)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

    def step(fault: bool) -> None:
        active[0] = fault
        take_step(handle, net, optimizer, lambda out: mean_square(out) * 1e-3)

    # The first step is watched, and its flag is read.
    for fault, unread in ((False, 0), (True, 1), (False, 2)):
        step(fault)
        assert len(scaler.unread) == unread
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
    # With the two steps above, eight are watched.
    for _ in range(6):
        step(False)
        assert len(scaler.unread) == 0
    step(False)
    # By now nothing is watched any more.
    assert len(scaler.unread) == 1
    assert handle.stats["found_inf"] == [2]


def test_o2() -> None:
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
    assert (found.kind, found.op, found.module, found.location) == ("half_precision_op", "mul", "faulty", BIG_TIMES_BIG)


def test_the_error_after_many_skips_carries_it() -> None:
    handle, net = started("dynamic"), Net(squared)
    handle.max_consecutive_skips = 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    take_step(handle, net, optimizer)
    with pytest.raises(NonFiniteGradientsError, match="mul in module faulty") as caught:
        take_step(handle, net, optimizer)
    assert caught.value.overflow is handle.last_overflow


# -- two ranks --

WORKER = """
import json, os, sys
import torch, torch.distributed as dist
import autoamp

class Net(torch.nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out.half() * 1e6 if self.bad else out

child = os.fork()
os.environ["RANK"] = "0" if child else "1"
dist.init_process_group("gloo")
rank, told = dist.get_rank(), []
# In the second run one rank does not trace.
for traced, steps, bad in ((True, 3, [1]), (rank == 0, 4, [2, 3])):
    torch.manual_seed(0)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
    net = Net(4, 4)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        net.bad = rank == 1 and step in bad
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().pow(2).mean()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    told += [handle.skipped_steps, handle.last_overflow.to_dict()]
    handle.deactivate()
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forks")
def test_on_one_of_two_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe, contextlib.closing(probe):
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    group = ["WORLD_SIZE=2", "MASTER_ADDR=localhost", f"MASTER_PORT={port}"]
    ended = launched(tmp_path, {"ranks": [*group, "python", str(script), str(tmp_path)]})["ranks"]
    assert ended.code == 0, ended.err
    clean, faulty = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (clean[0], faulty[0]) == (1, 1)
    assert clean[1]["verdict"] == {"type": Communication.__name__}
    assert clean[1]["iteration"] == 1
    assert "trace overflows on all ranks" in clean[1]["suggestion"]
    assert faulty[1]["kind"] == "half_precision_op"
    assert (faulty[1]["op"], faulty[1]["phase"]) == ("mul", "forward")
    assert faulty[1]["location"] == f"{script.name}:9"
    assert (clean[2], faulty[2]) == (2, 2)
    # It was not asked to trace, and looks on since its first skip.
    assert faulty[3]["location"] == f"{script.name}:9"
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
    optimizer, handle = torch.optim.SGD(model.parameters(), lr=0.01), started(64.0, traced=traced)
    x = torch.randn(2, 4, 16)
    for _ in range(12):
        take_step(handle, model, optimizer, loss, x)
    with Operators() as operators:
        take_step(handle, model, optimizer, loss, x)
    assert handle.skipped_steps == 0
    handle.deactivate()
    return operators.count


@pytest.mark.parametrize("loss", [cross_entropy, mean_square])
def test_what_a_clean_step_costs_more(loss: Callable[[Tensor], Tensor]) -> None:
    more = [
        operators_of_step(layers, loss, traced=True) - operators_of_step(layers, loss, traced=False)
        for layers in (1, 3)
    ]
    assert more == [0, 0]
