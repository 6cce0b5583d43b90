"""Compares a step with the same step in fp32.

An op may overflow without a gradient that is inf or nan: 1 / inf is 0, and so is every gradient behind it. Such a step
is taken. It is found by running the recorded calls of the step's model again, in half precision and in fp32.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.findings import CannotReplay, Trial, of_site
from autoamp.diagnostics.inspector import Backward, Flaw, Site, worst_of
from autoamp.diagnostics.records import Record
from autoamp.diagnostics.replay import replay
from autoamp.diagnostics.report.sampling import Allowance
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow
from autoamp.tensors import HALF_DTYPES, dtype_name

__all__ = ["Fault", "StepCheck"]

log = logging.getLogger(__name__)

_MOST_FAULTS = 6
# Gradients of parameters that are smaller than this part of the largest differ in any precision. What half precision
# has lost wholly counts down to a smaller one: below are sums that are 0 but for rounding.
_SMALL, _LOST = 1e-3, 1e-5
# A gradient that is further from that in fp32, as a part of it, has nothing to do with it.
_FAR = 0.5


@dataclass(frozen=True)
class Fault:
    """What half precision spoils in a step that was taken.

    Attributes:
        step: Its number.
        sentence: What was found, without the remedy.
        overflow: The op that it came from.
        zero: The parameters whose gradients are all 0, and are not in fp32.
    """

    step: int
    sentence: str
    overflow: Overflow
    zero: tuple[str, ...]


class StepCheck:
    """Compares steps that are about to be taken with fp32, by what `OverflowTrace` recorded of them.

    Args:
        handle: Whose steps they are. Nothing is compared unless it traces overflows.
        allowance: The time that may be taken.

    Attributes:
        faults: What half precision spoiled in steps that were taken.
        compared: How many steps were compared with fp32.
        seconds: The time for that.
        left_out: How many steps were not compared, as those before had taken the time for it.
        unchecked: Why a step could not be compared, where that is so.
    """

    def __init__(self, handle: Any, allowance: Allowance) -> None:
        self.faults: list[Fault] = []
        self.compared = 0
        self.seconds = 0.0
        self.left_out = 0
        self.unchecked: str | None = None
        self._handle = handle
        self._allowance = allowance

    def compare(self, step: int) -> None:
        """Compare the step at hand with the same in fp32, if its number, from 0, is 0, 1, 4, 16 and so on."""
        due = step == 0 or (step.bit_count() == 1 and step.bit_length() % 2 == 1)
        if not (due and self._handle.overflows.always) or len(self.faults) >= _MOST_FAULTS:
            return
        if self._allowance.left() < 0:
            self.left_out += 1
            return
        began, fault = time.perf_counter(), None
        try:
            fault = self._fault_of_step(step)
            self.compared += 1
        except Exception as error:
            # The program goes on, whatever it is.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._allowance.spent += seconds
        if fault is not None and fault.overflow.place not in [one.overflow.place for one in self.faults]:
            self.faults.append(fault)

    def _fault_of_step(self, step: int) -> Fault | None:
        """Return what half precision spoils in the step at hand though its gradients are finite; None where nothing."""
        recorded = [record for record in self._handle.overflows.records_of_step() if record.passes]
        # The program chose what is half there. Nobody runs its modules again in a step that is clean.
        records = [record for record in recorded if record.autocast is None]
        if not records:
            raise CannotReplay("no call of a module was recorded outside of torch.autocast")
        passes = [(one, one.gradients_of(loss)) for one in records if not one.too_large for loss in one.passes]
        with self._handle.overflows.apart(records):
            found = (self._fault(step, record, given) for record, given in passes)
            return next((fault for fault in found if fault is not None), None)

    def _fault(self, step: int, record: Record, given: list[Tensor | None]) -> Fault | None:
        if worst_of(given) is not None:
            return None
        half = replay(record, self._handle.casts)
        watch = half.backward_by(given)
        zero = any(not bool(one.any()) for name, one in half.results.items() if not name.startswith("input "))
        origins = [one for one in half.inspector.origins if _is_half(one.site) and not one.intended]
        vain = not any(bool(one.any()) for one in given if one is not None)
        if half.flawed() or not (origins or (zero and not vain)):
            # The step will be skipped, and explained; or all is well.
            return None
        if vain:
            # Outputs of 0 may have a loss whose gradient is 0 there.
            given = _probes(given)
            watch = half.backward_by(given)
        wide = replay(record, self._handle.casts, wide=True)
        wide.backward_by(given)
        spoiled = _spoiled(half, wide)
        lost = [name for name, is_zero in spoiled.items() if is_zero]
        if not lost and not (origins and spoiled):
            return None
        if origins:
            overflow = _overflow(origins[0].site, "forward", origins[0].flaw, origins[0].magnitudes)
            made = overflow.cause
        else:
            overflow = replace(_overflow(_vanishing(watch), "backward", Flaw(False, False), ()), value=None)
            words = ("in the backward pass of", overflow.op), ("in module", overflow.module), ("at", overflow.location)
            place = "".join(f" {word} {name}" for word, name in words if name)
            made = f"gradients vanish in half precision{place}, and not in fp32"
        names = lost or list(spoiled)
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = "are all 0" if lost else "are others than in fp32"
        return Fault(
            step, f"{made}; the step was taken, and the gradients of {told} {what}",
            replace(overflow, iteration=step, parameter=names[0]), tuple(lost),
        )  # fmt: skip


def _probes(outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients of all sizes from -1 to 1 for tensors of these shapes."""
    return [
        None if one is None else torch.linspace(-1.0, 1.0, one.numel(), device=one.device).view_as(one)
        for one in outputs
    ]


def _is_half(site: Site | None) -> bool:
    return site is not None and site.dtype in HALF_DTYPES


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float(), dtype=torch.float64))


def _spoiled(again: Trial, in_fp32: Trial) -> dict[str, bool]:
    """Return the parameters whose gradients are not those of fp32, and whether they are all 0."""
    wide = {name: one for name, one in in_fp32.results.items() if not name.startswith("input ")}
    sizes = {name: _size(one) / math.sqrt(max(one.numel(), 1)) for name, one in wide.items()}
    if not all(map(math.isfinite, sizes.values())):
        return {}
    largest = max(sizes.values(), default=0.0)
    found = {}
    for name, one in again.results.items():
        zero = not bool(one.any())
        if sizes.get(name, 0.0) <= (_LOST if zero else _SMALL) * largest:
            continue
        if zero or not _size(one.float() - wide[name].float()) <= _FAR * _size(wide[name]):
            found[name] = zero
    return found


def _vanishing(watch: Backward) -> Site | None:
    """Return the first call whose node got gradients and gave none but 0; None where none is seen."""
    for node, result in watch.results.items():
        behind = [watch.results[following] for following, _ in node.next_functions if following in watch.results]
        gave = max((max(one.magnitudes, default=0.0) for one in behind), default=1.0)
        if gave == 0.0 and max(result.magnitudes, default=0.0) > 0.0:
            return watch.sites[node]
    return None


def _overflow(site: Site | None, phase: str, flaw: Flaw, sizes: tuple[float, ...]) -> Overflow:
    if site is None:
        return Overflow(HalfPrecisionOp(), phase=phase)
    return of_site(site, HalfPrecisionOp(sizes, dtype_name(site.dtype), site.in_cast), phase, flaw)
