"""Surveys a program that runs in fp32: the listed ops that it calls, their ranges, and their times.

The survey keeps the arguments of the first call of each op, place and shapes. It times these calls after the program
has ended, or was stopped after some steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import class_name, known_ops
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.tools import BaseHandle, Call, CallSite, Exponents, OpRange, RangeProfile, diagnostics_of
from autoamp.tools.tuning.model import VARIANTS, Survey, Use

# So much of arguments is kept for timing.
_MOST_BYTES = 2**30


class SurveyEnded(BaseException):
    """Ends a program that has run for long enough. Not an `Exception`, so that programs do not handle it."""


@dataclass
class _Sample:
    """The first call of a use, with copies of its arguments; ``arguments`` is None if there was no room for them."""

    use: Use
    function: Any
    arguments: tuple[Any, Any] | None
    elements: int


class Surveyor(RangeProfile):
    """A range profile of a program that also keeps arguments of its calls; `survey` then times those calls.

    Args:
        handle: The active handle; it casts nothing meanwhile.
        steps: After so many optimizer steps `SurveyEnded` ends the program.
        seconds: It ends the program after that time as well.
    """

    def __init__(self, handle: BaseHandle, *, steps: int, seconds: float) -> None:
        super().__init__(diagnostics_of(handle).observation, lambda: handle.loss_scale)
        self._handle = handle
        self._dtype = dtype_name(handle.settings.dtype)
        self._most_steps = steps
        self._end = time.monotonic() + seconds
        self._samples: dict[tuple[str, CallSite, tuple[torch.Size, ...]], _Sample] = {}
        # The innermost modules at which calls are made.
        self._modules: dict[CallSite, Module] = {}
        # By op and place the exponents of arguments, and the operators that it calls; those that no listed op calls
        # have None in its place.
        self._values: defaultdict[tuple[str, CallSite], Exponents] = defaultdict(Exponents)
        self._within: defaultdict[tuple[str | None, CallSite], dict[str, OpRange]] = defaultdict(dict)
        self._kept = 0

    @property
    def seen(self) -> int:
        """How many uses were seen."""
        return len(self._samples)

    # -- looking on --

    def before(self, call: Call) -> None:
        """Count a call, and keep its arguments if it is the first of its kind."""
        if time.monotonic() > self._end:
            raise SurveyEnded
        # An optimizer calls functions, and a closure calls modules.
        if self._stepping and not call.modules:
            return
        super().before(call)
        tensors = [t for t in iter_tensors((call.args, call.kwargs)) if t.is_floating_point()]
        # Inner calls are part of the outermost.
        if call.outer is not None or not tensors or "out" in call.kwargs:
            return
        key = call.op.name, call.site, tuple(tensor.shape for tensor in tensors)
        if key not in self._samples:
            self._values[key[:2]].add(*tensors)
            self._samples[key] = self._sample(call, tensors)
        self._samples[key].use.calls += 1

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpRange | None:
        """Note the module and the listed op that an operator is called in."""
        row, here = super().saw(func, args, kwargs, result), self._observation.here
        if row is not None:
            outermost = here.call
            while outermost is not None and outermost.outer is not None:
                outermost = outermost.outer
            self._within[None if outermost is None else outermost.op.name, row.site][row.op] = row
            if here.modules:
                self._modules[row.site] = here.modules[-1]
        return row

    def _sample(self, call: Call, tensors: list[Tensor]) -> _Sample:
        in_place = call.op.name.endswith("_") and not call.op.name.endswith("__")
        function = call.op.functional if in_place else call.op.original
        size = sum(tensor.nbytes for tensor in tensors)
        fits = function is not None and self._kept + size <= _MOST_BYTES
        self._kept += size if fits else 0
        if call.modules:
            self._modules[call.site] = call.modules[-1]
        return _Sample(
            self._use(call.op.rule.target, call.op.rule.policy.value, call.site),
            function,
            map_tensors((call.args, call.kwargs), _copy) if fits else None,
            sum(tensor.numel() for tensor in tensors),
        )

    def _use(self, target: str, policy: str, site: CallSite) -> Use:
        module = self._modules.get(site)
        is_leaf = module is not None and next(module.children(), None) is None
        # A class in fp32 takes the modules within with it.
        known = module is not None and (is_leaf or policy != "unlisted")
        # Lists cannot name a module that is registered nowhere.
        path = site.module if is_leaf and "<" not in (site.module or "") else None
        return Use(target, policy, class_name(type(module)) if known else None, site.location, path)

    def _after_step(self, *_: Any) -> None:
        super()._after_step()
        if self.steps >= self._most_steps:
            raise SurveyEnded

    # -- afterwards --

    def survey(self, seconds: float) -> Survey:
        """Time the uses that were seen, those that compute most first, and return all that was found.

        Args:
            seconds: How long this takes. Uses that are left then are untimed.
        """
        end = time.monotonic() + seconds
        untimed = 0
        for sample in sorted(self._samples.values(), key=lambda one: -one.elements * one.use.calls):
            late = time.monotonic() > end
            untimed += late
            sample.use.seconds = {} if late else self._times(sample)
        uses = []
        for key, sample in self._samples.items():
            self._add_ranges(sample.use, self._within[key[:2]].values(), self._values[key[:2]])
            uses.append(sample.use)
        for row in (row for (op, _), rows in self._within.items() if op is None for row in rows.values()):
            target = row.op.removeprefix("aten::").rstrip("_").lstrip("_")
            if target in known_ops():
                uses.append(self._use(target, "unlisted", row.site))
                uses[-1].calls = row.calls
                self._add_ranges(uses[-1], [row])
        device_type, steps = self._handle.settings.device_type, max(1, self.steps)
        return Survey(device_type, self._dtype, steps, tuple(uses), untimed)

    def _add_ranges(self, use: Use, rows: Collection[OpRange], arguments: Exponents | None = None) -> None:
        """Tell what half precision does to the results of a use, and to its arguments."""
        found = [row.values for row in rows]
        use.overflow = max((values.in_format(self._dtype)["overflow"] for values in found), default=0)
        if arguments is not None:
            found.append(arguments)
            use.overflow += arguments.in_format(self._dtype)["overflow"]
        use.largest = max((values.largest for values in found if values.largest is not None), default=None)
        errors = [row.errors[self._dtype] for row in rows if self._dtype in row.errors]
        use.error = max((math.inf if math.isnan(error) else error for error in errors), default=None)

    def _times(self, sample: _Sample) -> dict[str, float]:
        """Return the median seconds of a call by `VARIANTS`, of blocks that take a fiftieth of a second together."""
        # Here, since its import takes a fifth of a second, and every program imports this package.
        from torch.utils.benchmark import Timer

        if sample.arguments is None:
            return {}
        half = self._handle.settings.dtype
        variants = ((torch.float32, None), (half, None), (torch.float32, half))
        found = {}
        for name, (dtype, within) in zip(VARIANTS, variants, strict=True):
            # Some ops have no kernel for half arguments.
            refused = contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError)
            with refused, self._handle.disable_casts(), torch.enable_grad():
                run = _repeatable(sample.function, sample.arguments, dtype, within)
                timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
                found[name] = float(timer.blocked_autorange(min_run_time=0.02).median)
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


def _copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy without the graph, in a dtype if it is a floating-point tensor that casts act on."""
    copied = tensor.detach().clone()
    return (copied if dtype is None else _cast(copied, dtype)).requires_grad_(tensor.requires_grad)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 or tensor.dtype in HALF_DTYPES else tensor
