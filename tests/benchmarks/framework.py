"""What whole runs cost: training steps, forward passes, a step's check of 200 gradients, import and `init()`."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.nn import Parameter

import autoamp
from tests.benchmarks.cases import Workload
from tests.benchmarks.models import MAKERS, lstm, resnet, transformer
from tests.benchmarks.runs import SCALE, Run
from tests.benchmarks.workers import LONG_SLICE, questions, seconds_of

PARAMETERS = 200


def runs(big: bool, device: str, dtype: torch.dtype) -> dict[str, Run]:
    """Return all runs by name; the big ones take seconds each. CPU kernels lack LSTM in fp16."""
    found = {
        f"{name}, {kind}": Run(kind, maker)
        for kind in ("train", "no_grad", "inference")
        for name, maker in MAKERS.items()
    }
    found["transformer of width 512, inference"] = Run("inference", functools.partial(transformer, width=512))
    found["LSTM of width 512, inference"] = Run("inference", functools.partial(lstm, width=512))
    if big:
        wide = functools.partial(transformer, width=512, batch=8, length=64, heads=8, words=1000)
        found["transformer, real work, train"] = Run("train", wide)
        found["ResNet-18, real work, train"] = Run("train", functools.partial(resnet, width=64, batch=8, size=96))
    if device == "cpu" and dtype is torch.float16:
        found = {name: run for name, run in found.items() if "LSTM" not in name}
    return found


def running(connection: Connection, way: str, dtype_name: str, device: str, big: bool) -> None:
    """Answer each name of a run, or of `CHECK`, with the seconds that one takes in one way."""
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    handle = None
    if way == "autoamp":
        scale = SCALE if dtype is torch.float16 else None
        handle = autoamp.init(device_type=device, dtype=dtype, loss_scale=scale)
    found, made = runs(big, device, dtype), dict[str, Workload]()
    counts: dict[str, int] = {}
    for name in questions(connection):
        if name not in made:
            made[name] = (
                _check(way, device, handle) if name == CHECK else found[name].workload(way, dtype, device, handle)
            )
            made[name] = made[name] if device == "cpu" else _waiting(made[name])
            counts[name] = 1
        connection.send(seconds_of(made[name], counts, name, LONG_SLICE))


CHECK = f"unscale, check and skip or step, {PARAMETERS} parameters"
"""The cost of a scaled step around the optimizer, which does nothing here."""


class _Nothing(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""


def _check(way: str, device: str, handle: Any) -> Workload:
    params = [Parameter(torch.randn(16, 16, device=device)) for _ in range(PARAMETERS)]
    gradients = [torch.zeros_like(parameter) for parameter in params]
    optimizer, loss = _Nothing(params), torch.ones((), device=device)

    def backward() -> None:
        for parameter, gradient in zip(params, gradients, strict=True):
            parameter.grad = gradient

    def plain() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    def scaled_by_handle() -> None:
        optimizer.zero_grad()
        with handle.scale_loss(loss, optimizer):
            backward()
        optimizer.step()

    scaler: Any = torch.amp.GradScaler(device, init_scale=SCALE)

    def scaled_by_torch() -> None:
        optimizer.zero_grad()
        scaler.scale(loss)
        backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return {"plain": plain, "autocast": scaled_by_torch, "autoamp": scaled_by_handle}[way]


def _waiting(workload: Workload) -> Workload:
    def run() -> None:
        workload()
        torch.accelerator.synchronize()

    return run


_START = """
import gc, time, torch
# What importing torch left to the garbage collector is none of ours, and more than all of it.
gc.collect()
start = time.process_time(); import autoamp; imported = time.process_time() - start
gc.collect()
start = time.process_time(); autoamp.init(device_type="cpu"); print(imported, time.process_time() - start)
"""


def start_up() -> tuple[float, float]:
    """Return the processor's seconds of ``import autoamp`` and of `init()`, in a fresh process that has torch."""
    answer = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True).stdout
    imported, init = map(float, answer.split())
    return imported, init


def growth() -> dict[str, list[tuple[int, float]]]:
    """Return by what grows the seconds of a step at each size: calls of an op, parameters, losses."""
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=SCALE)
    x, weight = torch.randn(4, 16), torch.randn(16, 16).half()
    half = x.half()

    def seconds(run: Callable[[], Any]) -> float:
        run()
        times = []
        for _ in range(5):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times)

    def calls(count: int) -> Callable[[], Any]:
        return lambda: [torch.matmul(half, weight) for _ in range(count)]

    def parameters(count: int, losses: int = 1) -> Callable[[], Any]:
        params = [Parameter(torch.zeros(1)) for _ in range(count)]
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter)
        optimizer, loss = _Nothing(params), torch.ones(())

        def step() -> None:
            for _ in range(losses):
                with handle.scale_loss(loss, optimizer):
                    pass
            optimizer.step()

        return step

    found = {
        "calls of matmul": [(n, seconds(calls(n))) for n in (10, 100, 1000, 10_000)],
        "parameters": [(n, seconds(parameters(n))) for n in (10, 100, 1000, 10_000, 100_000)],
        "losses, 100 parameters": [(n, seconds(parameters(100, n))) for n in (1, 2, 4, 8)],
    }
    handle.deactivate()
    return found


def draw(curves: dict[str, list[tuple[int, float]]], path: Any) -> None:
    """Write the curves as an SVG, each with the straight line of linear growth from its largest size down.

    Takes matplotlib, which is of the extra ``benchmark`` alone.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "autoamp", "font.family": "sans-serif"})
    from matplotlib import pyplot, ticker

    figure, all_axes = pyplot.subplots(1, len(curves), figsize=(10, 3.2), layout="constrained")
    for axes, (name, points) in zip(all_axes, curves.items(), strict=True):
        sizes, values = zip(*points, strict=True)
        largest = points[-1][1] * 1e3
        axes.loglog(sizes, [largest * size / sizes[-1] for size in sizes], ":", color="0.5", label="linear")
        axes.loglog(sizes, [value * 1e3 for value in values], "o-", label="measured")
        axes.set(xlabel=name, xticks=sizes, xticklabels=[f"{size:,}".replace(",", " ") for size in sizes])
        spread = max(values) / min(values)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if spread < 20 else (1.0,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    all_axes[0].set_ylabel("milliseconds of a step")
    all_axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
