"""Compares a step with the same step in fp32, and tries entries of a list on it.

An op may overflow without a gradient that is inf or nan: 1 / inf is 0, and so is every gradient behind it. Such a step
is taken. It is found by running the recorded calls of the step's model again, in half precision and in fp32.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.diagnostics.call_sites import user_frame
from autoamp.diagnostics.findings import shown_line
from autoamp.diagnostics.inspector import Backward, Site, bare_name, worst_of
from autoamp.diagnostics.op_names import spelled_at
from autoamp.diagnostics.records import Record
from autoamp.diagnostics.replay import CannotReplay, Replayed, replay
from autoamp.diagnostics.report.sampling import Allowance
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow
from autoamp.patching import original_of
from autoamp.rules import CastPolicy
from autoamp.tensors import HALF_DTYPES, map_tensors

__all__ = ["Entry", "Fault", "StepCheck"]

log = logging.getLogger(__name__)

# Of so many causes entries are tried.
_MOST_CAUSES = 6
# Gradients of parameters that are smaller than this part of the largest differ in any precision. What half precision
# has lost wholly counts down to a smaller one: below are sums that are 0 but for rounding.
_SMALL, _LOST = 1e-3, 1e-5
# A gradient that is further from that in fp32, as a part of it, has nothing to do with it.
_FAR = 0.5
# What the gradients at a model's outputs are multiplied by in turn, as the loss scale would be lower.
_FACTORS = (1.0, 2.0**-6, 2.0**-12)


@dataclass(frozen=True)
class Entry:
    """What a list is to have: the step was run with it.

    Attributes:
        names: The names of an op, or the dotted name of a module's class.
        of_module: Whether it is the latter, which belongs under ``[modules]``.
    """

    names: tuple[str, ...]
    of_module: bool

    def __str__(self) -> str:
        if self.of_module:
            return f'"{self.names[0]}" = "fp32" under [modules]'
        return f"fp32 = {json.dumps(self.names)}"


@dataclass(frozen=True)
class Fault:
    """What half precision spoils in a step that was taken.

    Attributes:
        step: Its number.
        sentence: What was found, without the remedy.
        overflow: The op that it came from.
        zero: The parameters whose gradients are all 0, and are not in fp32.
        entry: What cures it; None where nothing that was tried does.
    """

    step: int
    sentence: str
    overflow: Overflow
    zero: tuple[str, ...]
    entry: Entry | None


class StepCheck:
    """Compares steps that are about to be taken with fp32, by what `OverflowTrace` recorded of them.

    Args:
        handle: Whose steps they are. Nothing is compared unless it traces overflows.
        allowance: The time that may be taken.

    Attributes:
        faults: What half precision spoiled in steps that were taken.
        entries: The entry of a list that cures an overflow, by its place; None where none does.
        compared: How many steps were compared with fp32.
        seconds: The time for that.
        left_out: How many steps were not compared, as those before had taken the time for it.
        unchecked: Why a step could not be compared, where that is so.
    """

    def __init__(self, handle: Any, allowance: Allowance) -> None:
        self.faults: list[Fault] = []
        self.entries: dict[tuple[str | None, ...], Entry | None] = {}
        self.compared = 0
        self.seconds = 0.0
        self.left_out = 0
        self.unchecked: str | None = None
        self._handle = handle
        self._allowance = allowance

    def compare(self, step: int) -> None:
        """Compare the step at hand with the same in fp32, if its number, from 0, is 0, 1, 4, 16 and so on."""
        due = step == 0 or (step.bit_count() == 1 and step.bit_length() % 2 == 1)
        if not (due and self._handle.overflows.always) or len(self.faults) >= _MOST_CAUSES:
            return
        if self._allowance.left() < 0:
            self.left_out += 1
            return
        began, unchecked = time.perf_counter(), self.unchecked
        fault = self._tried(lambda: self._fault_of_step(step))
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._allowance.spent += seconds
        self.compared += self.unchecked is unchecked
        if fault is not None and fault.overflow.place not in [one.overflow.place for one in self.faults]:
            self.faults.append(fault)

    def try_entries(self, found: Overflow) -> None:
        """Look for the entry of a list that cures a step that is skipped, unless one was looked for.

        Args:
            found: Why it is skipped.
        """
        new = found.kind == HalfPrecisionOp.kind and found.place not in self.entries
        if self._handle.overflows.always and new and len(self.entries) < _MOST_CAUSES:
            self.entries[found.place] = self._tried(lambda: self._cure_of(found))

    def _tried(self, run: Callable[[], Any]) -> Any:
        """Return what a check finds; None where it cannot be made, of which the reason is kept."""
        try:
            return run()
        except Exception as error:
            # The program goes on, whatever it is.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)
            return None

    def _fault_of_step(self, step: int) -> Fault | None:
        """Return what half precision spoils in the step at hand though its gradients are finite; None where nothing."""
        latest = self._handle.overflows.recorder.latest
        recorded = [record for record in self._handle.overflows.records_of_step() if record.passes]
        # The program chose what is half there. Nobody runs its modules again in a step that is clean.
        records = [record for record in recorded if record.autocast is None]
        if not records and (latest is None or latest.autocast is not None):
            raise CannotReplay("no call of a module was recorded outside of torch.autocast")
        passes = [(one, one.gradients_of(loss)) for one in records if not one.too_large for loss in one.passes]
        # Gradients are recorded where the loss is scaled. Elsewhere the last call of a model is looked at.
        with self._handle.overflows.apart(records or [latest]):
            found = (self._fault(step, record, given) for record, given in (passes if records else [(latest, None)]))
            return next((fault for fault in found if fault is not None), None)

    def _fault(self, step: int, record: Record, given: list[Tensor | None] | None) -> Fault | None:
        if given is not None and worst_of(given) is not None:
            return None
        half = replay(record, self._handle.casts)
        if given is None:
            given = _probes([None if one is None or not one.requires_grad else one for one in half.outputs])
        watch = half.backward(given)
        zero = any(not bool(one.any()) for name, one in half.results.items() if not name.startswith("input "))
        origins = [one for one in half.inspector.origins if _is_half(one.site) and not one.intended]
        vain = not any(bool(one.any()) for one in given if one is not None)
        if half.flawed() or not (origins or (zero and not vain)):
            # The step will be skipped, and explained; or all is well.
            return None
        if vain:
            # Outputs of 0 may have a loss whose gradient is 0 there.
            given = _probes(given)
            watch = half.backward(given)
        wide = replay(record, self._handle.casts, wide=True)
        wide.backward(given)
        spoiled = _spoiled(half, wide)
        lost = [name for name, is_zero in spoiled.items() if is_zero]
        if not lost and not (origins and spoiled):
            return None
        if origins:
            overflow = _overflow(origins[0].site, "forward", origins[0].flaw.value, origins[0].magnitudes)
            made = overflow.cause
        else:
            overflow = _overflow(_vanishing(watch), "backward", None, ())
            words = ("in the backward pass of", overflow.op), ("in module", overflow.module), ("at", overflow.location)
            place = "".join(f" {word} {name}" for word, name in words if name)
            made = f"gradients vanish in half precision{place}, and not in fp32"
        names = lost or list(spoiled)
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = "are all 0" if lost else "are others than in fp32"
        return Fault(
            step, f"{made}; the step was taken, and the gradients of {told} {what}",
            replace(overflow, iteration=step, parameter=names[0]), tuple(lost),
            self._cure(record, given, half, wide, overflow),
        )  # fmt: skip

    def _cure_of(self, found: Overflow) -> Entry | None:
        """Return the entry of a list with which the step at hand has the gradients of fp32; None without one."""
        records = [record for record in self._handle.overflows.records_of_step() if record.passes]
        with self._handle.overflows.apart(records):
            for record in records:
                half = replay(record, self._handle.casts)
                given = record.gradients_of(next(iter(record.passes)))
                if worst_of(given) is not None:
                    # The outputs are not finite, and what came back to them neither.
                    given = _probes(given)
                half.backward(given)
                if half.flawed() or any(worst_of([output]) is not None for output in half.outputs):
                    wide = replay(record, self._handle.casts, wide=True)
                    wide.backward(given)
                    return self._cure(record, given, half, wide, found)
        return None

    def _cure(
        self, record: Record, given: Sequence[Tensor | None], half: Replayed, wide: Replayed, found: Overflow
    ) -> Entry | None:
        for entry in self._candidates(half, found):
            with contextlib.suppress(CannotReplay, RuntimeError), self._in_force(entry, half.root):
                again = replay(record, self._handle.casts, check=False)
                for factor in _FACTORS:
                    again.backward([None if one is None else one * factor for one in given])
                    if not again.flawed():
                        again.results = {name: one.float() / factor for name, one in again.results.items()}
                        if not _spoiled(again, wide):
                            return entry
                        break
        return None

    def _candidates(self, half: Replayed, found: Overflow) -> list[Entry]:
        """Return entries for the op and for the modules around it, those that take least out of half precision first.

        Entries that would leave no product in half precision are left out.
        """
        rule_of, paths = self._handle.settings.table.policy_of, dict(half.root.named_modules())
        products = [
            site for site in half.inspector.sites.values()
            if _is_half(site) and any((rule := rule_of(name)) and rule.policy is CastPolicy.FP16 for name in site.names)
        ]  # fmt: skip
        rated: list[tuple[int, Entry]] = []
        path = found.module if found.module in paths else None
        while path:
            cls = type(paths[path])
            name = _class_name(cls)
            if not name.startswith("torch.") and "<" not in name:
                own = tuple(f"{at}." for at, module in paths.items() if isinstance(module, cls))
                lost = sum(f"{site.module}.".startswith(own) for site in products)
                rated.append((lost, Entry((name,), of_module=True)))
            path = path.rpartition(".")[0]
        if found.fp32_names:
            lost = sum(not set(site.names).isdisjoint(found.fp32_names) for site in products)
            rated.append((lost, Entry(found.fp32_names, of_module=False)))
        rated.sort(key=lambda one: one[0])
        return [entry for lost, entry in rated if lost < len(products) or not products]

    @contextlib.contextmanager
    def _in_force(self, entry: Entry, root: Module) -> Iterator[None]:
        """Run modules within a ``with`` statement as if the lists had an entry."""
        with contextlib.ExitStack() as stack:
            if not entry.of_module:
                stack.enter_context(_InFp32(entry.names))
            for module in root.modules() if entry.of_module else ():
                if entry.names[0] in map(_class_name, type(module).__mro__):
                    stack.enter_context(self._handle.precisions.override(module, "fp32"))
            yield


class _InFp32(TorchFunctionMode):
    """Runs the ops that are called by some names on fp32 arguments."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs = original_of(func), kwargs or {}
        name = bare_name(function)
        if self._names.intersection(spelled_at(name, function, user_frame(sys._getframe(1)))):
            args, kwargs = map_tensors((args, kwargs), _to_fp32)
        return func(*args, **kwargs)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _probes(outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients of all sizes from -1 to 1 for tensors of these shapes."""
    return [
        None if one is None else torch.linspace(-1.0, 1.0, one.numel(), device=one.device).view_as(one)
        for one in outputs
    ]


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _is_half(site: Site | None) -> bool:
    return site is not None and site.dtype in HALF_DTYPES


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float(), dtype=torch.float64))


def _spoiled(again: Replayed, in_fp32: Replayed) -> dict[str, bool]:
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


def _overflow(site: Site | None, phase: str, value: str | None, sizes: tuple[float, ...]) -> Overflow:
    if site is None:
        return Overflow(HalfPrecisionOp(), phase=phase)
    verdict = HalfPrecisionOp(sizes, str(site.dtype).removeprefix("torch."), site.in_cast)
    return Overflow(
        verdict, op=site.op, module=site.module, location=shown_line(site.location), phase=phase, value=value,
        fp32_names=site.names,
    )  # fmt: skip
