"""Planted faults in all modes and places: the first finding of a run that records its steps is right, or is none."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import current_handle
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.tools import NotLocated, Overflow

MODES = ("auto_scale", "scale_loss", "fixed scale", "own GradScaler", "FP16_Optimizer", "O2", "bf16", "fp32")
PLACES = ("module", "between", "loss", "backward", "data", "weight", "optimizer state")
CLEAN = 2


def broken(value: Tensor) -> Tensor:
    return value - value.detach().max() - 1.0


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)  # fault: backward


class Block(nn.Module):
    """A layer with faults."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.fault == "module":
            hidden = torch.log(broken(hidden))  # fault: module
        if self.fault == "backward":
            hidden = Reciprocal.apply(hidden)
        out: Tensor = self.last(hidden)
        return out


class Residual(Block):
    """With dropout, a norm, and a running mean."""

    def __init__(self) -> None:
        super().__init__(16)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(x + super().forward(x)))
        return out


class Loss(nn.Module):
    """The loss of a program as a module."""

    fault = ""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        if self.fault == "loss":
            out = torch.sqrt(broken(out.float()))  # fault: loss
        return F.mse_loss(out.float(), target) * 1e-3


class Program(nn.Module):
    """Models, and what the script computes with them."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def plant(self, fault: str) -> None:
        vars(self.blocks[0])["fault"] = fault
        self.fault = fault

    def between(self, hidden: Tensor) -> Tensor:
        return torch.log(broken(hidden.float())) if self.fault == "between" else hidden  # fault: between

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """One model; the loss is code of the script."""
        out = self.between(self.blocks[0](x).float())
        difference = out - target
        if self.fault == "loss":
            difference = difference / (difference - difference)  # fault: loss
        return difference.square().mean() * 1e-3


class Two(Program):
    """Two models, and a loss that is a module."""

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        criterion = Loss()
        criterion.fault = self.fault
        loss: Tensor = criterion(self.blocks[1](self.between(self.blocks[0](x))), target)
        return loss


class Adversarial(Program):
    """A teacher without gradients, and a sum of losses in place."""

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.blocks[1](x).float()
        out = self.between(self.blocks[0](x).float())
        loss = F.smooth_l1_loss(out, taught) * 1e-3
        if self.fault == "loss":
            out = torch.exp(out.float() * 1e10)  # fault: loss
        loss += F.l1_loss(out.float(), target) * 1e-3
        return loss


PROGRAMS = {
    "one": lambda: Program(Block()),
    "two": lambda: Two(Block(), Residual()),
    "adversarial": lambda: Adversarial(Residual(), Block()),
}
CASES = list(itertools.product(PROGRAMS, MODES, PLACES))


@functools.cache
def lines_of(fault: str) -> set[str]:
    """Return ``file:line`` of each planted fault of a place."""
    texts = Path(__file__).read_text().splitlines()
    return {f"{Path(__file__).name}:{n}" for n, text in enumerate(texts, 1) if text.endswith(f"# fault: {fault}")}


def start(mode: str, program: Program, optimizer: Any) -> Any:
    if mode in ("O2", "fp32"):
        level: Any = "O2" if mode == "O2" else "O0"
        autoamp.initialize(
            list(program.blocks), optimizer, opt_level=level, verbosity=0, device_type="cpu", dtype=torch.float16,
            trace_overflow=True,
        )  # fmt: skip
        return current_handle()
    dtype = torch.bfloat16 if mode == "bf16" else torch.float16
    scale = 64.0 if mode == "fixed scale" else None
    return autoamp.init(device_type="cpu", dtype=dtype, scope="modules", loss_scale=scale, trace_overflow=True)


def first_finding(program: Program, mode: str, place: str) -> tuple[Overflow | None, int]:
    """Return what was found first in a few steps, and how many found inf or nan."""
    torch.manual_seed(0)
    optimizer: Any = torch.optim.SGD(program.parameters(), lr=0.01, momentum=0.9)
    handle, stepped = start(mode, program, optimizer), optimizer
    if mode == "FP16_Optimizer":
        stepped = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    scaler = torch.amp.GradScaler("cpu")
    program.plant("")
    with handle.auto_scale() if mode == "auto_scale" else contextlib.nullcontext():
        for step in range(CLEAN + (3 if place == "optimizer state" else 1)):
            x, target = torch.rand(4, 8), torch.rand(4, 8)
            if step == CLEAN:
                program.plant(place)
                plant_value(place, program, optimizer, x)
            stepped.zero_grad()
            loss = program.loss(x, target)
            if mode == "own GradScaler":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            elif mode == "FP16_Optimizer":
                stepped.backward(loss)
                stepped.step()
            elif mode in ("scale_loss", "fixed scale", "O2"):
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            else:
                loss.backward()
                optimizer.step()
    found, stats = list(handle.overflows), handle.stats
    handle.deactivate()
    return (found[0] if found else None), stats["skipped"] + stats["nonfinite"]


def plant_value(place: str, program: Program, optimizer: Any, x: Tensor) -> None:
    if place == "data":
        x[1, 2] = math.nan
    elif place == "weight":
        program.blocks[0].first.weight.data[0, 1] = math.nan
    elif place == "optimizer state":
        # Of the parameter that comes first in all programs.
        next(iter(optimizer.state.values()))["momentum_buffer"][0, 1] = math.nan


def is_right(found: Overflow, place: str) -> bool:
    if place == "data":
        return "the input x of" in str(found) and "at batch index 1" in str(found)
    if place in ("weight", "optimizer state"):
        return "the parameter or buffer first.weight holds nan" in str(found)
    return (found.location or "").rpartition("/")[2] in lines_of(place)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_is_right_or_not_located_and_most_are_located_at_their_first_time() -> None:
    located, reasons = 0, []
    for name, mode, place in CASES:
        found, bad = first_finding(PROGRAMS[name](), mode, place)
        case = f"{name}, {mode}, {place}"
        assert bad >= 1, case
        if found is None or isinstance(found.verdict, NotLocated):
            assert found is not None, case
            assert found.verdict.why, case
            reasons.append(f"{case}: {found}")
        else:
            assert is_right(found, place), f"{case}: {found}"
            located += 1
    assert len(CASES) >= 100
    assert located >= 0.85 * len(CASES), "\n".join(reasons)
