"""Faults planted in a loss, and scales that are too large: verdict, op and line of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.core import DynamicLossScaler
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.tools import HalfPrecisionOp, NotFiniteInFp32, Overflow, ScaleSearch
from tests.tools.faults import Fault, Net, found_in, line_of, mean_square, started, take_step, train


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
def test_a_fault_in_the_loss_is_located(name: str) -> None:
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
    is_static = scale == 4e5
    assert (found.iteration, found.kind) == (4, "scale_too_high" if is_static else "scale_search")
    assert found.is_failure is ("use a dynamic loss scale" in str(found)) is is_static


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


def test_a_second_pass_through_one_output_does_not_hide_the_overflow_of_the_first() -> None:
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


def test_a_scale_that_is_too_large_is_a_search_for_a_lower_one() -> None:
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


# -- an op that takes inf or nan is not named as the op that made it --


STEPS = 3
WEIGHT = torch.full((4, 4), 3e4, dtype=torch.float16)


def overflows_of(loss: Callable[[Tensor], Tensor], *models: nn.Module) -> list[Overflow]:
    """Return what was found in a few steps, all of which overflow."""
    torch.manual_seed(0)
    handle = started()
    optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.01)
    for _ in range(STEPS):
        take_step(handle, loss, optimizer, lambda value: value)
    found = list(handle.overflows)
    handle.deactivate()
    assert len(found) == STEPS
    return found


def explained(loss: Callable[[Tensor], Tensor]) -> Overflow:
    """Return what is found on demand."""
    handle = started(traced=False)
    found: Overflow | None = handle.explain_overflow(lambda: loss(torch.randn(5, 4)))
    handle.deactivate()
    assert found is not None
    return found


def prior(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.half().abs().clamp(10.0) @ WEIGHT


USES_OF_PRIOR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda out, inf: mean_square(out + inf),
    "in place": lambda out, inf: mean_square(out.clone().add_(inf)),
    "mul": lambda out, inf: mean_square(inf * out),
    "matmul": lambda out, inf: mean_square(out.float() @ inf.float().T),
    "target": lambda out, inf: F.mse_loss(out.float(), inf.float()),
    "weight": lambda out, inf: F.binary_cross_entropy_with_logits(
        out.float(), torch.ones(5, 4), pos_weight=inf.float()
    ),
}


@pytest.mark.parametrize("use", USES_OF_PRIOR)
def test_a_half_tensor_without_a_gradient_that_the_loss_takes(use: str) -> None:
    """The graph of the loss does not have the matmul; the first op that takes the inf is not named instead."""
    model = nn.Linear(4, 4)

    def loss(x: Tensor) -> Tensor:
        return USES_OF_PRIOR[use](model(x), prior(x))

    for matmul in (*overflows_of(loss, model), explained(loss)):
        assert isinstance(matmul.verdict, HalfPrecisionOp), str(matmul)
        assert (matmul.op, matmul.location) == ("matmul", line_of(prior, "@ WEIGHT"))


def skips_at(scale: Any, caplog: pytest.LogCaptureFixture, *, traced: bool) -> list[str]:
    """Train four steps whose gradients are finite at low scales, and return what overflows were told of."""
    caplog.clear()
    torch.manual_seed(0)
    net = Net(lambda h: h.half().mul(100.0).float())
    net.drop.p = 0.0
    handle, optimizer, x = started(scale, traced=traced), torch.optim.SGD(net.parameters(), lr=0.0), torch.randn(5, 4)
    for _ in range(4):
        take_step(handle, net, optimizer, lambda out: mean_square(out) * 0.01, x)
    return [one.getMessage() for one in caplog.records if one.name.endswith("overflow") and one.levelname == "WARNING"]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("at_limit", [False, True])
@pytest.mark.parametrize("falls", [False, True])
def test_a_scale_that_does_not_move_and_is_too_high_is_told_with_a_scale_that_does(
    traced: bool, at_limit: bool, falls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fixed(scale: float) -> Any:
        first = 2.0 * scale if falls else scale
        return DynamicLossScaler(first, min_loss_scale=scale) if at_limit else scale

    # Without the option the second skip is explained.
    told = skips_at(fixed(2.0**16), caplog, traced=traced)[-1]
    assert "overflowed at loss scale 65536: the loss scale is too high (first in the backward pass of" in told
    assert "normal" not in told
    remedy = "let min_loss_scale be at most" if at_limit else "use a dynamic loss scale, or a static one of at most"
    falls = False
    assert not skips_at(fixed(float(told.split(remedy)[1])), caplog, traced=traced)


def test_a_search_for_the_scale_is_told_once_to_those_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert not skips_at("dynamic", caplog, traced=False)
    (told,) = skips_at("dynamic", caplog, traced=True)
    assert "step 0 overflowed at loss scale 65536: the scale is being searched" in told
    assert told.endswith("the gradients are finite, which is normal")
