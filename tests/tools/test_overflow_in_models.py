"""Faults planted in modules, models, data and weights: verdict, op, module and line of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import current_handle
from autoamp.tools import HalfPrecisionOp, NotFiniteInFp32, NotLocated, ScaleSearch, diagnostics_of
from tests.tools.faults import (
    BIG_TIMES_BIG,
    Fault,
    Faulty,
    Net,
    SteepInHalf,
    found_by,
    found_in,
    line_of,
    mean_square,
    overflowing_in_fp32,
    root_of_zero,
    squared,
    started,
    thousandfold,
    train,
)


def doubled(h: Tensor) -> Tensor:
    return F.linear(h.float() * 1e6, torch.eye(8))


def steep_in_half(h: Tensor) -> Tensor:
    return h.half().mul(0.001).mul(500.0)


def half_root_of_zero(h: Tensor) -> Tensor:
    return h.half().mul(0).sqrt()


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


def steep(h: Tensor) -> Tensor:
    return torch.relu(Steep.apply(h)).mul(2.0)  # type: ignore[no-untyped-call]


def steep_function_in_half(h: Tensor) -> Tensor:
    return torch.relu(SteepInHalf.apply(h)).mul(2.0)  # type: ignore[no-untyped-call]


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
    "numpy": Fault(not_seen, NotLocated, None, line_of(not_seen, "from_numpy")),
    "vmap": Fault(torch.vmap(squared), HalfPrecisionOp, "mul", BIG_TIMES_BIG),
    "a function": Fault(steep, NotFiniteInFp32, "Steep", line_of(Steep.backward, "* float"), "backward", scale=1.5),
    "a function in half": Fault(
        steep_function_in_half, HalfPrecisionOp, "SteepInHalf", line_of(SteepInHalf.backward, "* 60000.0"), "backward",
        scale=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_module_is_located(name: str, on_demand: bool) -> None:
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


def test_intended_infinities_are_not_blamed() -> None:
    assert train(Net(masked)).last_overflow is None


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
def test_a_fault_in_a_model_is_located(name: str, on_demand: bool) -> None:
    make, expected = MODELS[name]
    found = found_by(make(), on_demand)
    assert (type(found.verdict), found.op, found.module, found.location) == expected, str(found)
    # What a checkpoint computes again is no call of the program.
    handle = current_handle()
    assert on_demand or (handle is not None and len(diagnostics_of(handle).overflows.recorder.step.models) == 1)


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
        # A ReLU makes it finite.
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "-inf", 2, "input"),
    ],
)
def test_inf_and_nan_in_the_data_are_told_with_tensor_and_row(
    make: Any, value: str, row: int, name: str, on_demand: bool
) -> None:
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
    # A module may have made it, such as a front end that a Dataset calls, also in another process.
    assert "look at the data" not in str(found)
    assert "or code that computes it; a front end that is a module can be kept in fp32" in str(found)


@pytest.mark.parametrize("take", [list.pop, lambda batch: batch[0].requires_grad_()], ids=["pop", "requires_grad_"])
def test_data_that_a_model_takes_out_of_its_batch_is_told_as_data(take: Any) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, batch: Any) -> Tensor:
            return self.net(take(batch))

    x = torch.randn(5, 4)
    x[2, 0] = torch.inf
    found = train(Taking(), data=lambda _, step: [x.clone()]).last_overflow
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.batch_index) == ("data", 2)


def test_a_weight_that_holds_nan_is_named() -> None:
    net = Net()
    with torch.no_grad():
        net.first.weight[2, 1] = float("nan")
    found = found_in(train(net))
    assert isinstance(found.verdict, NotFiniteInFp32)
    assert (found.verdict.cause, found.verdict.tensor, found.module) == ("weights", "first.weight", "first")


def test_an_overflow_in_a_frozen_model_is_located_if_the_training_uses_it() -> None:
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


@pytest.mark.parametrize("what", ["input", "outputs"])
def test_a_fault_is_located_though_the_program_overwrites_what_is_kept(what: str) -> None:
    net, x = Net(squared), torch.randn(5, 4)
    # The first layer keeps its input for backward unless its weight is frozen.
    net.first.requires_grad_(False)

    def loss(out: Tensor) -> Tensor:
        return mean_square(out.mul_(3.0)) if what == "outputs" else mean_square(out) + 0.0 * x.zero_().sum()

    found = found_in(train(net, data=lambda _, step: x, loss=loss))
    assert (found.kind, found.op, found.location) == ("half_precision_op", "mul", BIG_TIMES_BIG)
    assert not x.any() or what == "outputs"
