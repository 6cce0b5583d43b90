"""Entries of lists that are suggested for an overflow: each was tried on the tape, and does what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp


class Steep(nn.Module):
    """Functions of fp32 and half precision in turn. The gradient is too large for each half tensor between them."""

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


def test_where_no_entry_of_functions_heals_the_module_is_one() -> None:
    found = step_of(Steep())
    name = f"{__name__}.Steep"
    assert found.suggestion == f'add "{name}" = "fp32" under [modules] to the list file (tried)'
    assert (found.fp32_names, found.fp32_module) == ((), name)
    assert step_of(Steep(), lists={"modules": {name: "fp32"}}) is None


def entry_of(found: Any) -> dict[str, Any]:
    return {"modules": {found.fp32_module: "fp32"}} if found.fp32_module else {"fp32": list(found.fp32_names)}


@pytest.mark.parametrize("module", [Chain, Steep])
def test_an_entry_that_was_tried_heals(module: Callable[[], nn.Module]) -> None:
    found = step_of(module())
    assert "(tried)" in found.suggestion
    assert step_of(module(), lists=entry_of(found)) is None


def test_without_an_entry_that_heals_none_is_suggested() -> None:
    class Half(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.float() + (h.float() * 1e6).half()

    found = step_of(Half())
    assert (found.fp32_names, found.fp32_module) == ((), None)
    assert "no entry of a list was found that makes the step right" in found.suggestion
