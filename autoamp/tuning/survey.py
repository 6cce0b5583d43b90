"""Surveys a program as it runs in fp32: which listed ops it calls on what, their ranges, and what each costs.

The arguments of the first call of each op, place and shapes are kept. They are timed when the program has ended, or
was stopped after some steps, so that nothing that it computes is changed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import timeit
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.diagnostics import Call, CallSite, Exponents, Observer, OpRange, RangeProfile
from autoamp.ops import known_ops
from autoamp.runtime import BaseHandle
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.tuning.costs import Cost, Survey, Use

__all__ = ["SurveyEnded", "Surveyor", "time_of"]

# So much of arguments is kept for timing.
_MOST_BYTES = 2**30
_REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)
_Key = tuple[str, CallSite, str]


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
    """The first call of a use, with copies of its arguments; ``args`` is None where there was no room for them."""

    call_name: str
    target: str
    policy: str
    origin: str
    site: CallSite
    module_class: str | None
    function: Any
    args: Any
    kwargs: Any
    elements: int
    calls: int = 0


class Surveyor(Observer):
    """Looks on at a program, in fp32, between ``with`` and the end of it; `survey` then times what was seen.

    Args:
        handle: The active handle; it casts nothing meanwhile.
        steps: After so many steps of optimizers the program is ended by `SurveyEnded`.
        seconds: After that time as well.
        clock: Returns seconds.
    """

    def __init__(
        self, handle: BaseHandle, *, steps: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._handle = handle
        self._steps = steps
        self._clock = clock
        self._end = clock() + seconds
        self._samples: dict[_Key, _Sample] = {}
        # Dotted names of the classes of modules, by their names; None stands for one with modules within.
        self._classes: dict[str, set[str | None]] = {}
        # The paths of modules without modules within.
        self._leaves: set[str] = set()
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        # Inner calls, by name and place, are part of the outermost.
        self._outer: dict[tuple[str, CallSite], str] = {}
        self._overflowing: dict[tuple[str, CallSite], Exponents] = {}
        self._kept = 0
        self._stepping = False
        self._ranges: RangeProfile = handle.profile_ranges()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Surveyor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._ranges)
            stack.enter_context(self._handle.observe(self))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    @property
    def seen(self) -> int:
        """How many uses were seen."""
        return len(self._samples)

    # -- looking on --

    def before(self, call: Call) -> None:
        """Take note of a call, and keep its arguments where it is the first of its kind."""
        if self._clock() > self._end:
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
        shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
        key = call.op.name, call.site, shapes
        sample = self._samples.get(key)
        if sample is None:
            self._see_arguments(call, tensors)
            sample = self._samples[key] = self._sample(call, tensors)
        sample.calls += 1

    def _see_arguments(self, call: Call, tensors: list[Tensor]) -> None:
        """Count the exponents of what the op would get in half."""
        found = self._overflowing.setdefault((call.op.name, call.site), Exponents())
        found.add(*tensors)

    def _sample(self, call: Call, tensors: list[Tensor]) -> _Sample:
        rule = call.op.rule
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        fits = self._kept + size <= _MOST_BYTES
        self._kept += size if fits else 0
        in_place = call.op.name.endswith("_") and not call.op.name.endswith("__")
        function = call.op.functional if in_place else call.op.original
        return _Sample(
            call.op.name, rule.target, rule.policy.value, str(rule.origin), call.site,
            None if not call.modules else _class_of(call.modules[-1]), function,
            map_tensors(call.args, _copy) if fits and function is not None else None,
            map_tensors(call.kwargs, _copy) if fits and function is not None else None,
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
        """Time what was seen, what computes most first, and return all that was found.

        Args:
            seconds: So long; what is left then is untimed.
            timer: Returns the seconds of a call.
        """
        end = self._clock() + seconds
        order = sorted(self._samples, key=lambda key: -self._samples[key].elements * self._samples[key].calls)
        costs: dict[_Key, dict[str, Cost] | None] = {}
        untimed = 0
        for key in order:
            late = self._clock() > end
            untimed += late
            costs[key] = None if late else self._costs(self._samples[key], timer)
        rows: dict[tuple[str, CallSite], list[OpRange]] = {}
        unlisted = []
        for row in self._ranges.ops:
            if row.within is None:
                unlisted.append(row)
            else:
                name = self._outer.get((row.within, row.site), row.within)
                rows.setdefault((name, row.site), []).append(row)
        uses = [self._use(key, costs[key], rows.get(key[:2], [])) for key in self._samples]
        uses += [use for row in unlisted if (use := self._unlisted(row)) is not None]
        dtype = dtype_name(self._handle.settings.dtype)
        steps = max(1, self._ranges.steps)
        return Survey(self._handle.settings.device_type, dtype, str(torch.__version__), steps, tuple(uses), untimed)

    def _use(self, key: _Key, costs: dict[str, Cost] | None, rows: list[OpRange]) -> Use:
        sample, dtype = self._samples[key], dtype_name(self._handle.settings.dtype)
        arguments = self._overflowing[key[:2]]
        over = max((row.values.in_format(dtype)["overflow"] for row in rows), default=0)
        found = [row.values.largest for row in rows] + [arguments.largest]
        return Use(
            sample.call_name, sample.target, sample.policy, sample.calls, sample.origin, sample.module_class,
            sample.site.location, key[2], costs,
            overflow=over + arguments.in_format(dtype)["overflow"],
            largest=max((top for top in found if top is not None), default=None),
            error=_worst([row.errors[dtype] for row in rows if dtype in row.errors]),
            module=self._leaf(sample.site),
        )  # fmt: skip

    def _leaf(self, site: CallSite) -> str | None:
        return site.module if site.module in self._leaves else None

    def _unlisted(self, row: OpRange) -> Use | None:
        target = row.op.removeprefix("aten::").rstrip("_").lstrip("_")
        if target not in known_ops():
            return None
        dtype = dtype_name(self._handle.settings.dtype)
        over, largest = row.values.in_format(dtype)["overflow"], row.values.largest
        # In fp32 a class takes with it what is called within.
        classes = self._classes.get(row.site.module_class or "", {None})
        # What is finite in half is none of ours: errors of sums near 0 are everywhere.
        return Use(
            row.op, target, "unlisted", row.calls, module_class=next(iter(classes)) if len(classes) == 1 else None,
            location=row.site.location, overflow=over, largest=largest, error=row.errors.get(dtype),
            module=self._leaf(row.site),
        )  # fmt: skip

    def _costs(self, sample: _Sample, timer: Callable[[Callable[[], Any]], float]) -> dict[str, Cost] | None:
        if sample.args is None:
            return None
        half = self._handle.settings.dtype
        found = {}
        for name, dtype, within in (
            ("fp32", torch.float32, None),
            ("half", half, None),
            ("half_cast", torch.float32, half),
            ("fp32_cast", half, torch.float32),
        ):
            run = _Runner(sample, dtype, within)
            with contextlib.suppress(*_REFUSED), self._handle.disable_casts(), torch.enable_grad():
                kept = run.bytes()
                found[name] = Cost(timer(run), kept)
        return found


class _Runner:
    """One variant of a call: forward, and backward where gradients are recorded.

    Args:
        sample: The call.
        dtype: That of its floating arguments.
        within: What they are cast to within, and the result back from; None for no casts.
    """

    def __init__(self, sample: _Sample, dtype: torch.dtype, within: torch.dtype | None) -> None:
        self._function = sample.function
        self._dtype, self._within = dtype, within
        self._args, self._kwargs = (map_tensors(given, _caster(dtype)) for given in (sample.args, sample.kwargs))
        given = [t for t in iter_tensors((sample.args, sample.kwargs)) if t.requires_grad]
        made = [t for t in iter_tensors((self._args, self._kwargs)) if t.is_floating_point()]
        for tensor in made if given else ():
            tensor.requires_grad_()
        self._leaves = [tensor for tensor in made if tensor.requires_grad]
        self._gradients: list[Tensor] = []

    def _forward(self) -> list[Tensor]:
        args, kwargs = self._args, self._kwargs
        if self._within is not None:
            args, kwargs = (map_tensors(given, _to(self._within)) for given in (args, kwargs))
        result = self._function(*args, **kwargs)
        if self._within is not None:
            result = map_tensors(result, _to(self._dtype))
        return [tensor for tensor in iter_tensors(result) if tensor.is_floating_point()]

    def __call__(self) -> None:
        outputs = [tensor for tensor in self._forward() if tensor.requires_grad]
        if outputs and self._leaves:
            if not self._gradients:
                self._gradients = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, self._leaves, self._gradients, allow_unused=True)

    def bytes(self) -> int:
        """Run it once, and return the bytes of what it keeps for backward and returns, its arguments apart."""
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._forward()
        kept |= {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs}
        own = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors((self._args, self._kwargs))}
        return sum(size for place, size in kept.items() if place not in own)


def _class_of(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().to(dtype, copy=True) if _casts(tensor) else tensor.detach()


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if _casts(tensor) else tensor


def _casts(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 or tensor.dtype in HALF_DTYPES


def _worst(errors: list[float]) -> float | None:
    if any(math.isnan(error) for error in errors):
        return math.inf
    return max(errors, default=None)
