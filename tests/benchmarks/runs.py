"""Whole runs of a model, plain, under torch.amp and under autoamp: training steps and forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.cases import Workload

SCALE = 128.0


@dataclass(frozen=True)
class Run:
    """A model with its input and targets, and what is done with it.

    Attributes:
        kind: ``"train"``, ``"no_grad"``, or ``"inference"`` under `torch.inference_mode`, with the promise that weights
            stay where there is one to make.
        make: Makes the model, its input and its targets.
    """

    kind: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]

    def workload(self, way: str, dtype: torch.dtype, device: str = "cpu", handle: Any = None) -> Workload:
        """Return what is to be timed, made anew from one seed."""
        torch.manual_seed(0)
        model, x, y = self.make()
        model, x, y = model.to(device), x.to(device), y.to(device)
        region = _region(way, dtype, device)
        if self.kind == "train":
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            return _training(model, x, y, optimizer, region, _scaling(way, dtype, device, handle))
        model.eval()
        if self.kind == "no_grad":
            return _forward(model, x, torch.no_grad, region)
        forward = _forward(model, x, torch.inference_mode, region)
        if way == "autoamp":
            # The promise is for all the passes that come: it is made once, as a server would.
            promise = handle.inference(model)
            promise.__enter__()
            return lambda promise=promise: forward()
        return forward


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of a batch, over words or images."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _region(way: str, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    return (lambda: torch.autocast(device, dtype=dtype)) if way == "autocast" else contextlib.nullcontext


def _scaling(way: str, dtype: torch.dtype, device: str, handle: Any) -> Callable[[Tensor, Any], None]:
    """Return the backward pass and the step as each way's users write them: bf16 needs no scale."""
    if way == "autocast" and dtype is torch.float16:
        scaler: Any = torch.amp.GradScaler(device, init_scale=SCALE)

        def scaled_step(loss: Tensor, optimizer: Any) -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return scaled_step
    if way == "autoamp" and dtype is torch.float16:

        def handled_step(loss: Tensor, optimizer: Any) -> None:
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        return handled_step

    def plain_step(loss: Tensor, optimizer: Any) -> None:
        loss.backward()
        optimizer.step()

    return plain_step


def _training(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: Any, region: Callable[[], Any],
    step: Callable[[Tensor, Any], None],
) -> Workload:  # fmt: skip
    def run() -> None:
        optimizer.zero_grad()
        with region():
            loss = loss_of(model, x, y)
        step(loss, optimizer)

    return run


def _forward(model: nn.Module, x: Tensor, mode: Callable[[], Any], region: Callable[[], Any]) -> Workload:
    def run() -> Tensor:
        with mode(), region():
            return model(x)  # type: ignore[no-any-return]

    return run
