"""Opt level O2 beside torch.autocast: training steps of transformers in bf16, with the same optimizer both ways.

`UNSTEPPED` tells what no optimizer can be faster than: the forward and backward pass of a plain half model, whose
gradients are dropped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import autoamp
from autoamp import fp16_utils, optimizers
from tests.benchmarks.cases import Workload
from tests.benchmarks.traffic import bytes_of_a_step
from tests.benchmarks.workers import LONG_SLICE, questions, seconds_of, started

LAYERS, HEADS = 4, 4
DTYPE = torch.bfloat16
BYTES = "bytes of "
UNSTEPPED = "half, no step"

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW(fused)": functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "FP16_Optimizer(AdamW(fused))": functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "FusedAdam": functools.partial(optimizers.FusedAdam, lr=1e-4),
    "FusedSGD": functools.partial(optimizers.FusedSGD, lr=1e-4, momentum=0.9),
    "FusedLAMB": functools.partial(optimizers.FusedLAMB, lr=1e-4),
}


@dataclass(frozen=True)
class Step:
    """A training step: a stack of `torch.nn.TransformerEncoderLayer`, and an optimizer by its name.

    Attributes:
        width: The model's width; its linear layers within are four times as wide.
        batch: How many sequences.
        length: Of how many vectors each.
        optimizer: A name in `OPTIMIZERS`.
    """

    width: int
    batch: int
    length: int
    optimizer: str = "AdamW(fused)"

    @property
    def name(self) -> str:
        """What the table shows."""
        return f"width {self.width}, {self.batch} x {self.length}, {self.optimizer}"

    def training(self, way: str) -> Training:
        """Return the step, set up for one way from one seed."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(self.width, HEADS, 4 * self.width, dropout=0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        inputs = torch.randn(self.batch, self.length, self.width)
        if way == "autocast":
            return Training(model, inputs, OPTIMIZERS[self.optimizer](model.parameters()), way)
        if way == UNSTEPPED:
            model = model.to(DTYPE)
            # Of torch's optimizers, to drop gradients alike.
            return Training(model, inputs.to(DTYPE), torch.optim.SGD(model.parameters()), way)
        if self.optimizer.startswith("FP16_Optimizer"):
            model = fp16_utils.BN_convert_float(model.to(DTYPE))
            made: Any = fp16_utils.FP16_Optimizer(OPTIMIZERS[self.optimizer](model.parameters()))
            return Training(model, inputs.to(DTYPE), made, "FP16_Optimizer")
        model, optimizer = autoamp.initialize(
            model, OPTIMIZERS[self.optimizer](model.parameters()), opt_level="O2", device_type="cpu", dtype=DTYPE,
            verbosity=0,
        )  # fmt: skip
        return Training(model, inputs, optimizer, way)


STEPS = (
    Step(64, 2, 16),
    Step(512, 2, 16),
    Step(512, 8, 64),
    *(Step(512, 2, 16, name) for name in OPTIMIZERS if name != "AdamW(fused)"),
)
"""What is measured."""


@dataclass
class Training:
    """A model with its inputs and its optimizer, and the way in which they are trained."""

    model: Any
    inputs: Tensor
    optimizer: Any
    way: str

    def backward(self, then: Callable[[], None] = lambda: None) -> None:
        """Run forward and backward; call ``then`` when the gradients are there, before anything else is done."""
        if self.way == "autocast":
            with torch.autocast("cpu", dtype=DTYPE):
                loss = self._loss()
            loss.backward()
            then()
        elif self.way == UNSTEPPED:
            self._loss().backward()
            then()
        elif self.way == "FP16_Optimizer":
            # The block of `FP16_Optimizer.backward` ends within it.
            self.optimizer.backward(self._loss())
            then()
        else:
            with autoamp.scale_loss(self._loss(), self.optimizer) as scaled:
                scaled.backward()
                then()

    def _loss(self) -> Tensor:
        loss: Tensor = self.model(self.inputs).float().square().mean()
        return loss

    def rest(self) -> None:
        """Step, unless none is to be taken, and clear the gradients."""
        if self.way != UNSTEPPED:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Train once."""
        self.backward()
        self.rest()

    def bytes_by_parameter(self) -> float:
        """Return the bytes that a step moves for optimizer, masters and gradients, for each parameter."""
        weights = list(self.model.parameters())
        return bytes_of_a_step(weights, self.backward, self.rest) / sum(weight.numel() for weight in weights)


def ways() -> tuple[str, ...]:
    """Return the ways that are measured: O2 without the kernels always, and with them where they are installed."""
    kernels = ("O2, kernels",) if importlib.util.find_spec("autoamp_kernels") else ()
    return ("autocast", "O2", *kernels, UNSTEPPED)


def start(way: str) -> Connection:
    """Start the process of a way."""
    before = os.environ.get("AUTOAMP_KERNELS")
    os.environ["AUTOAMP_KERNELS"] = "1" if way == "O2, kernels" else "0"
    try:
        return started(stepping, way)
    finally:
        if before is None:
            del os.environ["AUTOAMP_KERNELS"]
        else:
            os.environ["AUTOAMP_KERNELS"] = before


def stepping(connection: Connection, way: str) -> None:
    """Answer each name of a step with its seconds, and that name after `BYTES` with its bytes for each parameter."""
    torch.set_num_threads(1)
    by_name, made = {step.name: step for step in STEPS}, dict[str, Training]()
    counts: dict[str, int] = {}
    for question in questions(connection):
        name = question.removeprefix(BYTES)
        if name not in made:
            made[name] = by_name[name].training(way)
            for _ in range(2):
                made[name].run()
            counts[name] = 1
        run: Workload = made[name].run
        answer = (
            made[name].bytes_by_parameter() if question.startswith(BYTES) else seconds_of(run, counts, name, LONG_SLICE)
        )
        connection.send(answer)
