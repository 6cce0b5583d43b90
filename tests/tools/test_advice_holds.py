"""Advice holds where it is printed: the entry that a finding names heals the program at the level that printed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.tools import Overflow, ScaleSearch

D = 16
STEPS = 6
LEVELS = ["O1", "O2", "O3", "run"]

Fault = Callable[["Planted", Tensor], Tensor]


class Planted(nn.Module):
    """Two layers, and what a program for fp32 computes between them. Its results are of about 1 in fp32."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.w = nn.Parameter(torch.randn(D, D) / D)
        self.last = nn.Linear(D, 4)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        # The first row is 0, as that of padding is.
        h = self.first(x) * (torch.arange(len(x)) > 0)[:, None]
        out: Tensor = self.last(self.fault(self, h))
        return out


FAULTS: dict[str, Fault] = {}


def planted(fault: Fault) -> Fault:
    FAULTS[fault.__name__] = fault
    return fault


@planted
def square_by_operator(net: Planted, h: Tensor) -> Tensor:
    x = h * 1000.0
    return h * (x * x) / ((x * x).mean(-1, keepdim=True) + 1.0)


@planted
def norm_of_rows_of_zero(net: Planted, h: Tensor) -> Tensor:
    h = torch.relu(h)
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True, unbiased=False) + 1e-8)


@planted
def dice_by_einsum(net: Planted, h: Tensor) -> Tensor:
    x = h.abs() * 1000.0
    both = torch.einsum("bi,bi->b", x, x.flip(0))
    return h * (both / (torch.einsum("bi,bi->b", x, x) + both + 1.0))[:, None]


@planted
def angle_of_a_clamped_cosine(net: Planted, h: Tensor) -> Tensor:
    cosine = F.cosine_similarity(h, h.detach(), dim=-1)[:, None]
    return h + torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))


@planted
def exponential_of_a_matrix(net: Planted, h: Tensor) -> Tensor:
    grown = torch.matrix_exp(12.0 * torch.eye(D, dtype=net.w.dtype) + net.w)
    return h @ (grown / grown.amax())


@planted
def softplus_by_hand(net: Planted, h: Tensor) -> Tensor:
    return torch.log(1.0 + torch.exp(h + 12.0)) / 12.0


@planted
def mean_by_sum(net: Planted, h: Tensor) -> Tensor:
    x = h.abs() * 1000.0 + 9000.0
    return h + x.sum(-1, keepdim=True) / D / 9000.0


@planted
def reciprocal_of_zero(net: Planted, h: Tensor) -> Tensor:
    return h * torch.reciprocal(h.abs().sum(-1, keepdim=True) + 1e-8)


@planted
def log_with_a_small_epsilon(net: Planted, h: Tensor) -> Tensor:
    p = torch.sigmoid(h * 100.0)
    return h - 0.01 * (p + 1e-8).log()


@planted
def root_with_a_small_epsilon(net: Planted, h: Tensor) -> Tensor:
    return h + torch.sqrt(h * h + 1e-9)


@planted
def scores_scaled_late(net: Planted, h: Tensor) -> Tensor:
    x = h * 1000.0
    return h + (x @ x.T * 1e-6).softmax(-1) @ h


@planted
def running_product(net: Planted, h: Tensor) -> Tensor:
    x = h.sigmoid() + 3.0
    return h + x.cumprod(-1) / x.detach().cumprod(-1)


@planted
def variance_of_large_values(net: Planted, h: Tensor) -> Tensor:
    x = h * 1000.0
    return h * (x.var(-1, keepdim=True) / (x.detach().var(-1, keepdim=True) + 1.0))


@planted
def sum_of_squares_by_pow(net: Planted, h: Tensor) -> Tensor:
    x = h * 1000.0
    return h * x.pow(2) / (x.pow(2).sum(-1, keepdim=True) + 1.0)


def train(fault: str, level: str, lists: dict[str, Any] | None = None) -> autoamp.Handle:
    """Take some steps at a level, and return the handle."""
    torch.manual_seed(0)
    model, x = Planted(FAULTS[fault]), torch.randn(8, D)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    settings: dict[str, Any] = {"dtype": torch.float16, "device_type": "cpu", "lists": lists}
    # The search goes down by as many steps as there are at most.
    settings["loss_scale"] = autoamp.DynamicLossScaler(16.0)
    if level == "run":
        handle = autoamp.init(scope="modules", trace_overflow=True, **settings)
        handle.auto_scale()
    else:
        autoamp.initialize(model, optimizer, opt_level=level, verbosity=0, trace_overflow=True, **settings)
        handle = autoamp.current_handle()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if level == "run":
            loss.backward()
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    return handle


def advised(found: Overflow) -> dict[str, Any] | None:
    """Return the lists of the entry that a finding names, None if it names none."""
    if found.fp32_module is not None:
        return {"modules": {found.fp32_module: "fp32"}}
    return {"fp32": list(found.fp32_names)} if found.fp32_names else None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_printed_entry_heals_at_the_level_that_printed_it(fault: str, level: str) -> None:
    handle = train(fault, level)
    found = handle.last_overflow
    handle.deactivate()
    if found is None:
        # The lists of O1 keep it in fp32, those of O2 what has no half kernel.
        assert level in ("O1", "run") or fault == "exponential_of_a_matrix"
        return
    assert "(tried)" in str(found), str(found)
    lists = advised(found)
    assert lists is not None
    handle = train(fault, level, lists)
    left = [one for one in handle.overflows if not isinstance(one.verdict, ScaleSearch)]
    assert not left, f"{found}\nwith it: {left[0]}"
    assert not handle.last_step_skipped
