"""What looking on costs: a training step of a transformer with each tool over the same step without it.

Each tool's base is the step that it looks on at: fp32 without autoamp for torch's tools and hooks, autoamp's own step
for ours. With and without take turns, and a ratio is that of steps with the tool over steps just before and after.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.diagnostics import Observer, OverflowTrace
from autoamp.runtime import runtime_of
from tests.benchmarks.models import transformer
from tests.benchmarks.runs import SCALE, Run

WIDTHS = 64, 512
BLOCKS = 2
# What the rounds of one tool at one width may take: the table is whole within four minutes.
SECONDS = 8.0
TRACE, RANGES = "handle.trace()", "handle.profile_ranges()"
STEP = "autoamp's own step, over one in fp32"
Tool = Callable[[nn.Module, Any], Any]


class _Finite(TorchDispatchMode):
    """Asks of each floating result of each operator whether all of it is finite."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                bool(output.isfinite().all())
        return result


@contextlib.contextmanager
def _module_hooks(model: nn.Module, handle: Any) -> Iterator[None]:
    """Look at the largest and smallest magnitude of each module's outputs."""

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            magnitude = output.detach().abs()
            magnitude.min().item(), magnitude.max().item()

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


TORCHS: dict[str, Tool] = {
    "detect_anomaly": lambda model, handle: torch.autograd.detect_anomaly(),
    "DebugMode": lambda model, handle: DebugMode(),
    "DebugMode with stacks": lambda model, handle: DebugMode(record_stack_trace=True),
    "isfinite of each operator": lambda model, handle: _Finite(),
    "magnitudes in module hooks": _module_hooks,
}
OURS: dict[str, Tool] = {
    "off, after an observer": lambda model, handle: _off(handle),
    "handle.observe(Observer())": lambda model, handle: handle.observe(Observer()),
    "handle.count()": lambda model, handle: handle.count(),
    TRACE: lambda model, handle: handle.trace(),
    RANGES: lambda model, handle: handle.profile_ranges(),
    "init(trace_overflow=True)": lambda model, handle: _traced(handle),
}


@contextlib.contextmanager
def _off(handle: Any) -> Iterator[None]:
    """Look on for a moment, and no more: what its ratio is off 1 by is the noise of the measurement."""
    handle.observe(Observer()).stop()
    yield


@contextlib.contextmanager
def _traced(handle: Any) -> Iterator[None]:
    """Let a handle trace overflows, as ``init(trace_overflow=True)`` does from the start, for steps that are clean."""
    run = runtime_of(handle)
    trace = run.overflows = OverflowTrace(run.casts)
    run.optimizers.watch = trace
    run.install_anew()
    try:
        yield
    finally:
        run.optimizers.watch = run.overflows = None
        trace.close()
        run.install_anew()


def measure(dtype: str, rounds: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, dict[int, list[float]]]:
    """Return by tool and width the ratios of a step with the tool over one without, a value a round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: dict[str, dict[int, list[float]]] = {name: {} for name in (*TORCHS, STEP, *OURS)}
        for width in widths:
            for name, ratios in _measure(getattr(torch, dtype), rounds, width).items():
                found[name][width] = ratios
        return found
    finally:
        torch.set_num_threads(threads)


def _measure(dtype: torch.dtype, rounds: int, width: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    # A step of the narrow model takes milliseconds.
    steps = 24 if width < 256 else 4
    models: list[nn.Module] = []
    plain = Run("train", functools.partial(_kept, models, width)).workload("plain", dtype)
    for name, tool in TORCHS.items():
        around = functools.partial(tool, models[0], None)
        found[name] = _rounds(functools.partial(_ratio, plain, around, steps // 4), rounds)
    in_fp32 = [_seconds(plain, steps) for _ in range(rounds)]
    handle: Any = autoamp.init(device_type="cpu", dtype=dtype, loss_scale=SCALE)
    own = Run("train", functools.partial(_kept, models, width)).workload("autoamp", dtype, handle=handle)
    own()
    found[STEP] = [_seconds(own, steps) / base for base in in_fp32]
    for name, tool in OURS.items():
        fewer = 4 if name in (TRACE, RANGES) else 1
        # A range profile computes in fp32, and so does the step that it is compared with.
        with handle.disable_casts() if name == RANGES else contextlib.nullcontext():
            around = functools.partial(tool, models[1], handle)
            found[name] = _rounds(functools.partial(_ratio, own, around, steps // fewer), rounds)
    handle.deactivate()
    return found


def _kept(models: list[nn.Module], width: int) -> Any:
    made = transformer(width=width, blocks=BLOCKS)
    models.append(made[0])
    return made


def _rounds(measured: Callable[[], float], rounds: int) -> list[float]:
    """Return what was measured: a value a round, of as many as there is time for, and of three at least."""
    end = time.monotonic() + SECONDS
    found: list[float] = []
    while len(found) < rounds and (len(found) < 3 or time.monotonic() < end):
        found.append(measured())
    return found


def _ratio(run: Callable[[], Any], around: Callable[[], Any], steps: int) -> float:
    """Return the time of steps with a tool over those before and after; what enters and leaves it is not timed."""
    run()
    before = _seconds(run, steps)
    with around():
        run()
        run()
        looked_at = _seconds(run, steps)
    run()
    return looked_at / statistics.fmean((before, _seconds(run, steps)))


def _seconds(run: Callable[[], Any], steps: int) -> float:
    times = []
    for _ in range(max(1, steps)):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)
