"""Fused optimizers against the papers' formulas, tensor by tensor in fp64, and against torch's own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.optimizers import FusedAdam, FusedLAMB, FusedSGD

STEPS = 5
SHAPES = [(3, 4), (5,)]


def gradients() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def stepped(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the parameters after some steps with fixed gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = make(params)
    for grads in gradients():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
    return [param.detach().double() for param in params]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("decoupled", "decay"), list(itertools.product([True, False], [0.0, 0.1])))
def test_adam_is_torchs(decoupled: bool, decay: float) -> None:
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    assert_close(
        stepped(lambda p: FusedAdam(p, lr=0.01, adam_w_mode=decoupled, weight_decay=decay)),
        stepped(lambda p: theirs(p, lr=0.01, weight_decay=decay), torch.float64),
    )


def test_adam_without_bias_correction() -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).double() for shape in SHAPES]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for grads in gradients():
        for i, grad in enumerate(grads):
            first[i] = 0.9 * first[i] + 0.1 * grad
            second[i] = 0.999 * second[i] + 0.001 * grad.double() ** 2
            values[i] = values[i] - 0.01 * first[i] / (second[i].sqrt() + 1e-8)
    assert_close(stepped(lambda p: FusedAdam(p, lr=0.01, bias_correction=False)), values, 1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
     {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}],
)  # fmt: skip
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    assert_close(
        stepped(lambda p: FusedSGD(p, lr=0.1, **options)),
        stepped(lambda p: torch.optim.SGD(p, lr=0.1, **options), torch.float64),
    )


def test_sgd_with_decay_after_momentum() -> None:
    torch.manual_seed(0)
    values, velocity = [torch.randn(shape).double() for shape in SHAPES], [0.0, 0.0]
    for grads in gradients():
        for i, grad in enumerate(grads):
            velocity[i] = 0.9 * velocity[i] + grad.double()
            values[i] = values[i] - 0.1 * (velocity[i] + 0.01 * values[i])
    ours = stepped(lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, wd_after_momentum=True))
    assert_close(ours, values)


@pytest.mark.parametrize(("decay", "nvlamb", "clip", "averaging"), [
    (0.01, False, 1.0, True), (0.0, False, 0.0, True), (0.0, True, 1.0, False), (0.1, True, 0.5, True),
])  # fmt: skip
def test_lamb_follows_the_paper(decay: float, nvlamb: bool, clip: float, averaging: bool) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).double() for shape in SHAPES]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for step, grads in enumerate(gradients(), start=1):
        total = torch.sqrt(sum(grad.double().square().sum() for grad in grads))
        factor = min(1.0, clip / float(total)) if clip else 1.0
        for i, grad in enumerate(grads):
            clipped = grad.double() * factor
            first[i] = 0.9 * first[i] + (0.1 if averaging else 1.0) * clipped
            second[i] = 0.999 * second[i] + 0.001 * clipped**2
            update = first[i] / (1 - 0.9**step) / ((second[i] / (1 - 0.999**step)).sqrt() + 1e-6) + decay * values[i]
            trust = values[i].norm() / update.norm() if decay or nvlamb else 1.0
            values[i] = values[i] - 0.01 * trust * update
    ours = stepped(
        lambda p: FusedLAMB(
            p, lr=0.01, weight_decay=decay, use_nvlamb=nvlamb, max_grad_norm=clip, grad_averaging=averaging
        )
    )
    assert_close(ours, values, 1e-5)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedSGD])
def test_half_parameters_have_fp32_state_that_a_checkpoint_keeps(kind: Any, half: torch.dtype) -> None:
    extra = {"momentum": 0.9} if kind is FusedSGD else {}
    param = torch.nn.Parameter(torch.randn(4).to(half))
    optimizer = kind([param], lr=0.01, **extra)
    param.grad = torch.randn(4).to(half)
    optimizer.step()
    states = {name: value.clone() for name, value in optimizer.state[param].items()}
    assert {value.dtype for value in states.values()} == {torch.float32}
    other = kind([torch.nn.Parameter(param.detach().clone())], lr=0.5, **extra)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (loaded,) = other.param_groups[0]["params"]
    loaded.grad = param.grad.clone()
    for name, value in states.items():
        assert torch.equal(other.state[loaded][name], value)
        assert other.state[loaded][name].dtype is torch.float32
    optimizer.step()
    other.step()
    assert torch.equal(param, loaded)


def test_masters_keep_what_half_rounds_off() -> None:
    plain, kept = torch.nn.Parameter(torch.ones(1).half()), torch.nn.Parameter(torch.ones(1).half())
    optimizers = [FusedAdam([plain], lr=1e-4), FusedAdam([kept], lr=1e-4, master_weights=True)]
    for _ in range(20):
        for param in (plain, kept):
            param.grad = torch.ones(1).half()
        for optimizer in optimizers:
            optimizer.step()
    assert plain == 1.0
    assert float(kept) == pytest.approx(1.0 - 20e-4, abs=5e-4)


def test_closure_scheduler_and_missing_gradients() -> None:
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([used, unused], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert used != 1.0
    assert unused == 1.0


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad_follows_the_constructor(set_grad_none: bool) -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([param], set_grad_none=set_grad_none)
    param.grad = torch.ones(1)
    optimizer.zero_grad()
    assert (param.grad is None) is set_grad_none
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


def test_bad_input() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(UsageError, match="amsgrad"):
        FusedLAMB(params, amsgrad=True)
    with pytest.raises(UsageError, match="nesterov"):
        FusedSGD(params, lr=0.1, nesterov=True)
    with pytest.raises(UsageError, match="lr=-1"):
        FusedSGD(params, lr=-1.0)
    params[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        FusedAdam(params).step()
