"""Surveys a program that runs in fp32: the listed ops that it calls, their ranges, and their times.

The survey keeps the arguments of the first call of each op, place and shapes. It times these calls after the program
has ended, or was stopped after some steps.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import timeit
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.diagnostics import Call, CallSite, Exponents, Observer, OpRange, RangeProfile
from autoamp.ops import known_ops
from autoamp.program import listen
from autoamp.runtime import BaseHandle
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.tuning.costs import VARIANTS, Survey, Use

# So much of arguments is kept for timing.
_MOST_BYTES = 2**30
_REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)
_Key = tuple[str, CallSite, tuple[torch.Size, ...]]


class SurveyEnded(BaseException):
    """Ends a program that has run for long enough. Not an `Exception`, so that programs do not handle it."""


def time_of(run: Callable[[], Any], seconds: float = 0.02) -> float:
    """Return the seconds of a call: the median of up to five blocks of calls, which together take about ``seconds``."""
    timer = timeit.Timer(run, timer=_synchronized_clock)
    timer.timeit(1)
    once = max(timer.timeit(1), 1e-9)
    blocks = min(5, 1 + int(seconds / once))
    calls = max(1, int(seconds / blocks / once))
    return statistics.median(timer.repeat(blocks, calls)) / calls


def _synchronized_clock() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@dataclass
class _Sample:
    """The first call of a use, with copies of its arguments; ``arguments`` is None if there was no room for them."""

    target: str
    policy: str
    module_class: str | None
    function: Any
    arguments: tuple[Any, Any] | None
    elements: int
    calls: int = 0


class Surveyor(Observer):
    """Observes a program in fp32; `survey` then times the calls that it has seen.

    Args:
        handle: The active handle; it casts nothing meanwhile.
        steps: After so many optimizer steps `SurveyEnded` ends the program.
        seconds: It ends the program after that time as well.
    """

    def __init__(self, handle: BaseHandle, *, steps: int, seconds: float) -> None:
        self._handle = handle
        self._steps = steps
        self._end = time.monotonic() + seconds
        self._samples: dict[_Key, _Sample] = {}
        # Dotted names of the classes of modules, by their names; None stands for one with modules within.
        self._classes: dict[str, set[str | None]] = {}
        # The paths of modules without modules within.
        self._leaves: set[str] = set()
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        # Inner calls, by name and place, are part of the outermost.
        self._outer: dict[tuple[str, CallSite], str] = {}
        # The exponents of arguments, by op and place.
        self._values: dict[tuple[str, CallSite], Exponents] = {}
        self._kept = 0
        self._stepping = False
        self._ranges: RangeProfile = handle.profile_ranges()

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the program inside a ``with`` statement."""
        with (
            # First, so that its hook has counted a step before ours looks.
            self._ranges,
            self._handle.observe(self),
            listen(optimizer_called=self._before_step, optimizer_returned=self._after_step),
        ):
            yield

    @property
    def seen(self) -> int:
        """How many uses were seen."""
        return len(self._samples)

    # -- looking on --

    def before(self, call: Call) -> None:
        """Count a call, and keep its arguments if it is the first of its kind."""
        if time.monotonic() > self._end:
            raise SurveyEnded
        if self._stepping:
            return
        if call.modules and call.modules[0] not in self._roots:
            self._roots.add(call.modules[0])
            for path, module in call.modules[0].named_modules():
                name = None if next(module.children(), None) else _class_of(module)
                self._leaves.update([] if name is None else [path])
                self._classes.setdefault(type(module).__name__, set()).add(name)
        outer = call.outer
        if outer is not None:
            while outer.outer is not None:
                outer = outer.outer
            self._outer[call.op.name, call.site] = outer.op.name
            return
        tensors = [t for t in iter_tensors((call.args, call.kwargs)) if t.is_floating_point()]
        if not tensors or "out" in call.kwargs:
            return
        key = call.op.name, call.site, tuple(tensor.shape for tensor in tensors)
        if key not in self._samples:
            self._values.setdefault(key[:2], Exponents()).add(*tensors)
            self._samples[key] = self._sample(call, tensors)
        self._samples[key].calls += 1

    def _sample(self, call: Call, tensors: list[Tensor]) -> _Sample:
        in_place = call.op.name.endswith("_") and not call.op.name.endswith("__")
        function = call.op.functional if in_place else call.op.original
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        fits = function is not None and self._kept + size <= _MOST_BYTES
        self._kept += size if fits else 0
        return _Sample(
            call.op.rule.target, call.op.rule.policy.value,
            _class_of(call.modules[-1]) if call.modules else None, function,
            map_tensors((call.args, call.kwargs), _copy) if fits else None,
            sum(tensor.numel() for tensor in tensors),
        )  # fmt: skip

    def _before_step(self, *_: Any) -> None:
        self._stepping = True

    def _after_step(self, *_: Any) -> None:
        self._stepping = False
        if self._ranges.steps >= self._steps:
            raise SurveyEnded

    # -- afterwards --

    def survey(self, seconds: float, timer: Callable[[Callable[[], Any]], float] = time_of) -> Survey:
        """Time the uses that were seen, those that compute most first, and return all that was found.

        Args:
            seconds: How long this takes. Uses that are left then are untimed.
            timer: Returns the seconds of a call.
        """
        end = time.monotonic() + seconds
        times: dict[_Key, dict[str, float] | None] = {}
        untimed = 0
        for key, sample in sorted(self._samples.items(), key=lambda item: -item[1].elements * item[1].calls):
            late = time.monotonic() > end
            untimed += late
            times[key] = None if late else self._times(sample, timer)
        rows: dict[tuple[str, CallSite], list[OpRange]] = {}
        unlisted = []
        for row in self._ranges.ops:
            if row.within is None:
                unlisted.append(row)
            else:
                name = self._outer.get((row.within, row.site), row.within)
                rows.setdefault((name, row.site), []).append(row)
        uses = [self._use(key, times[key], rows.get(key[:2], [])) for key in self._samples]
        uses += [use for row in unlisted if (use := self._unlisted(row)) is not None]
        settings = self._handle.settings
        steps = max(1, self._ranges.steps)
        return Survey(
            settings.device_type, dtype_name(settings.dtype), str(torch.__version__), steps, tuple(uses), untimed
        )

    def _use(self, key: _Key, times: dict[str, float] | None, rows: list[OpRange]) -> Use:
        op, site, _ = key
        sample, dtype = self._samples[key], dtype_name(self._handle.settings.dtype)
        arguments = self._values[op, site]
        results = max((row.values.in_format(dtype)["overflow"] for row in rows), default=0)
        largest = (arguments.largest, *(row.values.largest for row in rows))
        errors = [row.errors[dtype] for row in rows if dtype in row.errors]
        return Use(
            op, sample.target, sample.policy, sample.calls, sample.module_class, site.location, times,
            overflow=results + arguments.in_format(dtype)["overflow"],
            largest=max((exponent for exponent in largest if exponent is not None), default=None),
            error=max((math.inf if math.isnan(error) else error for error in errors), default=None),
            module=site.module if site.module in self._leaves else None,
        )  # fmt: skip

    def _unlisted(self, row: OpRange) -> Use | None:
        target = row.op.removeprefix("aten::").rstrip("_").lstrip("_")
        if target not in known_ops():
            return None
        dtype = dtype_name(self._handle.settings.dtype)
        # A class in fp32 takes the modules within with it.
        classes = self._classes.get(row.site.module_class or "", {None})
        return Use(
            row.op, target, "unlisted", row.calls, next(iter(classes)) if len(classes) == 1 else None,
            row.site.location, overflow=row.values.in_format(dtype)["overflow"], largest=row.values.largest,
            error=row.errors.get(dtype), module=row.site.module if row.site.module in self._leaves else None,
        )  # fmt: skip

    def _times(self, sample: _Sample, timer: Callable[[Callable[[], Any]], float]) -> dict[str, float] | None:
        if sample.arguments is None:
            return None
        half = self._handle.settings.dtype
        variants = ((torch.float32, None), (half, None), (torch.float32, half))
        found = {}
        for name, (dtype, within) in zip(VARIANTS, variants, strict=True):
            with contextlib.suppress(*_REFUSED), self._handle.disable_casts(), torch.enable_grad():
                found[name] = timer(_repeatable(sample.function, sample.arguments, dtype, within))
        return found


def _repeatable(
    function: Callable[..., Any], arguments: tuple[Any, Any], dtype: torch.dtype, within: torch.dtype | None
) -> Callable[[], None]:
    """Return a function that makes a call: forward, and backward if gradients are recorded.

    Args:
        function: The function that is called.
        arguments: Its positional and named arguments.
        dtype: The dtype of its floating-point arguments.
        within: The dtype that each call casts them to, and its result back from; None for no casts.
    """
    arguments = map_tensors(arguments, lambda tensor: _copy(tensor, dtype))
    leaves = [tensor for tensor in iter_tensors(arguments) if tensor.requires_grad]

    def forward() -> list[Tensor]:
        args, kwargs = arguments if within is None else map_tensors(arguments, lambda tensor: _cast(tensor, within))
        result = function(*args, **kwargs)
        if within is not None:
            result = map_tensors(result, lambda tensor: _cast(tensor, dtype))
        return [tensor for tensor in iter_tensors(result) if tensor.requires_grad]

    gradients = [torch.ones_like(output) for output in forward()]

    def run() -> None:
        outputs = forward()
        if outputs:
            torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    return run


def _class_of(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy without the graph, in a dtype if it is a floating-point tensor that casts act on."""
    copied = tensor.detach().clone()
    return (copied if dtype is None else _cast(copied, dtype)).requires_grad_(tensor.requires_grad)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 or tensor.dtype in HALF_DTYPES else tensor
