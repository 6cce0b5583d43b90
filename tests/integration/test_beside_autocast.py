"""Programs that half precision harms, beside fp32 and torch.autocast: autoamp is never farther from fp32 by a tenth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import shipped_table

Program = Callable[[], list[Tensor]]


def focal_loss() -> list[Tensor]:
    """Confident predictions: 1 - p is far below the rounding of a half p near 1."""
    model, x = nn.Linear(16, 4), torch.randn(64, 16)
    target = model(x).argmax(1)
    logits = model(x) * 12
    p = logits.softmax(-1).gather(1, target[:, None])
    loss = ((1 - p) ** 2 * -p.log()).mean()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def sigmoid_focal_loss() -> list[Tensor]:
    model, x = nn.Linear(16, 4), torch.randn(64, 16)
    p = (-F.softplus(-model(x) * 12)).exp()
    loss = ((1 - p) ** 2 * -p.log()).mean()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def decay() -> list[Tensor]:
    """A product of 500 factors near 1, as linear attention has them."""
    model, x = nn.Linear(8, 8), torch.randn(500, 8)
    factors = torch.exp(-torch.exp(model(x) * 0.1 - 6))
    state = torch.ones(8)
    for factor in factors:
        state = state * factor
    return [state, *torch.autograd.grad(state.sum(), list(model.parameters()))]


def router() -> list[Tensor]:
    """The share of each expert: ties of rounded probabilities send tokens elsewhere."""
    model, x = nn.Linear(32, 64), torch.randn(4096, 32)
    weights, experts = model(x).softmax(-1).topk(2)
    return [F.one_hot(experts, 64).sum(1).float(), weights]


def rope_by_einsum() -> list[Tensor]:
    t, inv_freq = torch.arange(4096.0), 1 / 10000 ** (torch.arange(0, 64, 2) / 64)
    angles = torch.einsum("i,j->ij", t, inv_freq)
    return [angles, angles.cos(), angles.sin()]


def rope_by_outer() -> list[Tensor]:
    t, inv_freq = torch.arange(4096), 1 / 10000 ** (torch.arange(0, 64, 2) / 64)
    angles = [
        torch.outer(t, inv_freq),
        torch.ger(t.float(), inv_freq),
        t[:, None] * inv_freq,
        t.float().outer(inv_freq),
    ]
    return [*angles, torch.addr(torch.zeros(4096, 32), t.float(), inv_freq), *(one.cos() for one in angles)]


def positions_like_queries() -> list[Tensor]:
    """A program's own cast of positions, to the dtype of what a layer returned."""
    q = nn.Linear(8, 8)(torch.randn(4096, 8))
    return [torch.arange(4096).type_as(q)[:, None] * 0.01 + q]


def grid_into_a_layer() -> list[Tensor]:
    """Coordinates as inputs of a layer."""
    grid = torch.cartesian_prod(torch.linspace(0, 511, 32), torch.linspace(0, 511, 32))
    return [torch.sin(nn.Linear(2, 8)(grid))]


def grid_sample() -> list[Tensor]:
    theta = nn.Linear(8, 6)(torch.randn(1, 8)).view(1, 2, 3)
    return [F.grid_sample(torch.randn(1, 3, 64, 64), F.affine_grid(theta, [1, 3, 64, 64], False), align_corners=False)]


PROGRAMS = (
    focal_loss, sigmoid_focal_loss, decay, router, rope_by_einsum, rope_by_outer, positions_like_queries,
    grid_into_a_layer, grid_sample,
)  # fmt: skip


def run(program: Program) -> list[Tensor]:
    """The results of a program, each of some seeds together: roundings of one go this way or that."""
    runs = []
    for seed in range(6):
        torch.manual_seed(seed)
        runs.append([result.detach().double() for result in program()])
    return [torch.stack(results) for results in zip(*runs, strict=True)]


def distances(found: list[Tensor], reference: list[Tensor]) -> list[float]:
    """How far results are from those of fp32; inf for nan."""
    pairs = zip(found, reference, strict=True)
    return [float((one - other).norm().nan_to_num(float("inf"))) for one, other in pairs]


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_near_to_fp32_as_those_of_autocast(half: torch.dtype, program: Program) -> None:
    reference = run(program)
    with torch.autocast("cpu", dtype=half):
        theirs = distances(run(program), reference)
    autoamp.init(device_type="cpu", dtype=half)
    ours = distances(run(program), reference)
    assert all(one <= 1.1 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_bf16_set_of_cuda_is_as_near_to_fp32_as_autocasts_list_for_cuda(program: Program) -> None:
    """By the lists alone, as the CPU computes: `default` is torch's list for CUDA."""
    reference = run(program)
    found = []
    for name in ("bf16", "default"):
        handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, lists=shipped_table(name, "cuda"))
        found.append(distances(run(program), reference))
        handle.deactivate()
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(*found, strict=True)), found
