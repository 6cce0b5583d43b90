"""What a finding suggests: an entry that avoids the overflow, or why no entry does."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.tools import HalfPrecisionOp
from tests.tools.faults import (
    Faulty,
    Net,
    found_by,
    found_in,
    line_of,
    overflowing_in_fp32,
    root_of_zero,
    squared,
    take_step,
    thousandfold,
    train,
)


def test_a_finding_has_value_suggestion_magnitudes_iteration_and_scale() -> None:
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


def test_an_entry_that_is_in_force_is_not_suggested() -> None:
    found = found_in(train(Net(log_of_rounded)))
    assert (found.kind, found.op) == ("half_precision_op", "log")
    assert "log" not in found.fp32_names
    assert '"log"' not in str(found.suggestion)
    assert found.fp32_names
    assert "(tried)" in str(found.suggestion)
    handle = train(Net(log_of_rounded), lists={"fp32": list(found.fp32_names)})
    assert handle.last_overflow is None


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


def test_an_in_place_form_that_computes_in_fp32_is_named_and_not_the_copy_of_its_result() -> None:
    def fault(h: Tensor) -> Tensor:
        big = h.detach().half().clamp(12.0, 12.0) + 0 * h.half()
        return h + 1e-9 * big.exp_().sum(dtype=torch.float32)

    found = found_in(train(Net(fault)))
    assert (found.op, found.fp32_names) == ("exp", ("exp",))
    assert str(found.suggestion).startswith("write it out of place")


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


# -- entries for modules --


class Steep(nn.Module):
    """Two gradients of the input are too large for half precision, and their sum is not."""

    def forward(self, h: Tensor) -> Tensor:
        return h.square().sub(h.square().amax(-1, keepdim=True)).exp() * h


class SteepWithin(nn.Module):
    """As `Steep`, of what a function of the module itself makes."""

    def forward(self, h: Tensor) -> Tensor:
        m = h.mul(1.0).sub(0.5).add(0.5).abs()
        return m.square().sub(m.square().amax(-1, keepdim=True)).exp() * h


class Chain(nn.Module):
    """A square that is too large for the products after it."""

    def forward(self, h: Tensor) -> Tensor:
        return h * h * 1e-6


def step_of(module: nn.Module, **settings: Any) -> Any:
    """Step once in fp16 at values of some hundreds, and return the finding; None for a step that was finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 4))
    nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
    options = {"loss_scale": 2.0, "trace_overflow": True, **settings}
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with handle.scale_loss(model(300.0 + torch.rand(4, 8) * 100.0).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    found = handle.last_overflow
    handle.deactivate()
    return found


def entry_of(found: Any) -> dict[str, Any]:
    return {"modules": {found.fp32_module: "fp32"}} if found.fp32_module else {"fp32": list(found.fp32_names)}


@pytest.mark.parametrize("module", [Chain, Steep, SteepWithin])
def test_an_entry_that_was_tried_heals(module: type[nn.Module]) -> None:
    found = step_of(module())
    assert "(tried)" in found.suggestion
    assert step_of(module(), lists=entry_of(found)) is None
    if module is Steep:
        # No entry of functions does.
        name = f"{__name__}.Steep"
        assert found.suggestion == f'add "{name}" = "fp32" under [modules] to the list file (tried)'
        assert (found.fp32_names, found.fp32_module) == ((), name)


def test_without_an_entry_that_heals_none_is_suggested() -> None:
    class Half(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.float() + (h.float() * 1e6).half()

    found = step_of(Half())
    assert (found.fp32_names, found.fp32_module) == ((), None)
    assert "no entry of a list was found that makes the step right" in found.suggestion


def test_gradients_that_were_inf_before_the_step_are_no_fault_of_the_entry() -> None:
    torch.manual_seed(0)
    stepped, left = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=8.0)
    for size in (1.0, 1e6, 1e6):
        x = torch.randn(2, 3) * size
        optimizer.zero_grad()
        loss = sum(layer(x).float().square().mean() for layer in (stepped, left))
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    found = found_in(handle)
    handle.deactivate()
    assert found.suggestion == 'add fp32 = ["linear"] to the list file (tried)'
