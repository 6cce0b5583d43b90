"""What looking on costs: a training step of a transformer with each tool over the same step without it.

Each tool's base is the step that it looks on at: fp32 without autoamp for torch's tools and hooks, autoamp's own step
for ours. With and without take turns, and a ratio is that of a pair.
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
    "handle.observe(Observer())": lambda model, handle: handle.observe(Observer()),
    "handle.count()": lambda model, handle: handle.count(),
    "handle.trace()": lambda model, handle: handle.trace(),
    "handle.profile_ranges()": lambda model, handle: handle.profile_ranges(),
    "init(trace_overflow=True)": lambda model, handle: _traced(handle),
}


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
    torch.set_num_threads(1)
    found: dict[str, dict[int, list[float]]] = {name: {} for name in (*TORCHS, *OURS)}
    for width in widths:
        for tools, way in ((TORCHS, "plain"), (OURS, "autoamp")):
            handle: Any = None
            if way == "autoamp":
                handle = autoamp.init(device_type="cpu", dtype=getattr(torch, dtype), loss_scale=SCALE)
            models: list[nn.Module] = []
            run = Run("train", functools.partial(_kept, models, width)).workload(
                way, getattr(torch, dtype), handle=handle
            )
            for name, tool in tools.items():
                around = functools.partial(tool, models[0], handle)
                found[name][width] = [_ratio(run, around) for _ in range(rounds)]
            if handle is not None:
                handle.deactivate()
    return found


def _kept(models: list[nn.Module], width: int) -> Any:
    made = transformer(width=width)
    models.append(made[0])
    return made


def _ratio(run: Callable[[], Any], around: Callable[[], Any], steps: int = 3) -> float:
    """Return the time of steps with a tool over that of as many without; what enters and leaves it is not timed."""
    run()
    plain = _seconds(run, steps)
    with around():
        run()
        looked_at = _seconds(run, steps)
    return looked_at / plain


def _seconds(run: Callable[[], Any], steps: int) -> float:
    times = []
    for _ in range(steps):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)
