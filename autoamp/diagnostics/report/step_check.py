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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from autoamp.diagnostics.call_sites import shown_file, user_frame
from autoamp.diagnostics.inspector import Backward, Site, bare_name, worst_of
from autoamp.diagnostics.op_names import spelled_at
from autoamp.diagnostics.records import Record
from autoamp.diagnostics.replay import CannotReplay, Replayed, kept_state, replay
from autoamp.diagnostics.report.sampling import Allowance
from autoamp.diagnostics.verdicts import HalfPrecisionOp, Overflow
from autoamp.patching import original_of
from autoamp.rules import CastPolicy
from autoamp.tensors import HALF_DTYPES, map_tensors

__all__ = ["Entry", "Fault", "StepCheck", "cause_of"]

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


def cause_of(found: Overflow) -> tuple[str | None, ...]:
    """Return by what overflows are of one cause."""
    return found.op, found.module, found.location, found.phase


@dataclass(eq=False)
class _Call:
    """One recorded call of a step, run again in half precision, and in fp32."""

    record: Record
    given: list[Tensor | None]
    half: Replayed
    wide: Replayed

    def spoiled(self, again: Replayed) -> dict[str, bool]:
        """Return the parameters whose gradients are not those of fp32, and whether they are all 0."""
        wide = {name: one for name, one in self.wide.results.items() if not name.startswith("input ")}
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


class StepCheck:
    """Compares steps that are about to be taken with fp32, by what `OverflowTrace` recorded of them.

    Args:
        handle: Whose steps they are. Nothing is compared unless it traces overflows.
        allowance: The time that may be taken.

    Attributes:
        faults: What half precision spoiled in steps that were taken.
        entries: By the cause of skips the entry of a list that cures it; None where none does.
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
        fault = self._tried(lambda: self._look_at_step(step))
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._allowance.spent += seconds
        self.compared += self.unchecked is unchecked
        if fault is not None and cause_of(fault.overflow) not in [cause_of(one.overflow) for one in self.faults]:
            self.faults.append(fault)

    def try_entries(self, found: Overflow) -> None:
        """Look for the entry of a list that cures a step that is skipped, unless its cause is known.

        Args:
            found: Why it is skipped.
        """
        new = found.kind == HalfPrecisionOp.kind and cause_of(found) not in self.entries
        if self._handle.overflows.always and new and len(self.entries) < _MOST_CAUSES:
            self.entries[cause_of(found)] = self._tried(lambda: self._cure_of(found))

    def _tried(self, run: Callable[[], Any]) -> Any:
        """Return what a check finds; None where it cannot be made, of which the reason is kept."""
        try:
            return run()
        except Exception as error:
            # Whatever it is, the program goes on as if nothing looked on.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)
            return None

    @contextlib.contextmanager
    def _apart(self, records: Sequence[Record]) -> Iterator[None]:
        """Run modules again within a ``with`` statement: nothing of it is recorded, observed, or left behind."""
        recorder, cache = self._handle.overflows.recorder, self._handle.casts.cache
        modules = [module for record in records if (module := record.module()) is not None]
        paused, recorder.paused = recorder.paused, True
        cache.clear()
        try:
            with self._handle.observation.unobserved(), kept_state(modules):
                yield
        finally:
            cache.clear()
            recorder.paused = paused

    def _look_at_step(self, step: int) -> Fault | None:
        """Return what half precision spoils in the step at hand though its gradients are finite; None where nothing."""
        latest = self._handle.overflows.recorder.latest
        recorded = [record for record in self._handle.overflows.records_of_step() if record.passes]
        # The program chose what is half there. Nobody runs its modules again in a step that is clean.
        records = [record for record in recorded if record.autocast is None]
        if not records and (latest is None or latest.autocast is not None):
            raise CannotReplay("no call of a module was recorded outside of torch.autocast")
        # Gradients are recorded where the loss is scaled. Elsewhere the last call of a model is looked at.
        with self._apart(records or [latest]):
            if not records:
                return self._look(step, latest, None)
            for record in records:
                for loss in () if record.too_large else record.passes:
                    found = self._look(step, record, record.gradients_of(loss))
                    if found is not None:
                        return found
        return None

    def _look(self, step: int, record: Record, given: list[Tensor | None] | None) -> Fault | None:
        if given is not None and worst_of(given) is not None:
            return None
        half = replay(record, self._handle.casts)
        if given is None:
            given = [None if one is None or not one.requires_grad else _probe(one) for one in half.outputs]
        watch = half.backward(given)
        zero = [name for name, one in half.results.items() if not name.startswith("input ") and not bool(one.any())]
        origins = [one for one in half.inspector.origins if _is_half(one.site) and not one.intended]
        vain = not any(bool(one.any()) for one in given if one is not None)
        if half.flawed() or not (origins or (zero and not vain)):
            # The step will be skipped, and explained; or all is well.
            return None
        if vain:
            # Outputs of 0 may have a loss whose gradient is 0 there.
            given = [None if one is None else _probe(one) for one in given]
            watch = half.backward(given)
        wide = replay(record, self._handle.casts, wide=True)
        wide.backward([None if one is None else one.float() for one in given])
        call = _Call(record, given, half, wide)
        spoiled = call.spoiled(half)
        zero = [name for name, is_zero in spoiled.items() if is_zero]
        if not zero and not (origins and spoiled):
            return None
        if origins:
            site, flaw, sizes = origins[0].site, origins[0].flaw, origins[0].magnitudes
            assert site is not None
            made = f"{_place(site)} made {flaw.value} in {_short(site.dtype)} from magnitudes {_listed(sizes)}"
            overflow = _overflow(site, "forward", flaw.value, sizes)
        else:
            site = _vanishing(watch, half.results)
            made = "gradients vanish in half precision" + (
                "" if site is None else f" in the backward pass of {_place(site)}"
            )
            overflow = _overflow(site, "backward", None, ())
        what = "are all 0" if zero else "are others than in fp32"
        names = zero or list(spoiled)
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        sentence = f"{made}, and not in fp32; the step was taken, and the gradients of {told} {what}"
        overflow = replace(overflow, iteration=step, parameter=names[0])
        return Fault(step, sentence, overflow, tuple(zero), self._cure(call, overflow))

    def _cure_of(self, found: Overflow) -> Entry | None:
        """Return the entry of a list with which the step at hand has the gradients of fp32; None without one."""
        records = [record for record in self._handle.overflows.records_of_step() if record.passes]
        with self._apart(records):
            for record in records:
                half = replay(record, self._handle.casts)
                given = record.gradients_of(next(iter(record.passes)))
                if worst_of(given) is not None:
                    # The outputs are not finite, and what came back to them neither.
                    scale = found.loss_scale or 1.0
                    given = [
                        None
                        if one is None or output is None
                        else torch.full_like(output, scale / max(output.numel(), 1))
                        for one, output in zip(given, half.outputs, strict=True)
                    ]
                half.backward(given)
                if not half.flawed() and all(worst_of([output]) is None for output in half.outputs):
                    continue
                wide = replay(record, self._handle.casts, wide=True)
                wide.backward([None if one is None else one.float() for one in given])
                return self._cure(_Call(record, given, half, wide), found)
        return None

    def _cure(self, call: _Call, found: Overflow) -> Entry | None:
        for entry in self._candidates(call.half, found):
            with contextlib.suppress(CannotReplay, RuntimeError), self._in_force(entry, call.half.root):
                again = replay(call.record, self._handle.casts, check=False)
                for factor in _FACTORS:
                    again.backward([None if one is None else one * factor for one in call.given])
                    if not again.flawed():
                        break
                scaled = {name: one.float() / factor for name, one in again.results.items()}
                again.results = scaled
                if not again.flawed() and not call.spoiled(again):
                    return entry
        return None

    def _candidates(self, half: Replayed, found: Overflow) -> list[Entry]:
        """Return entries for the op and for the modules around it, those that take least out of half precision first.

        What would leave nothing in half precision is none of them.
        """
        table, root = self._handle.settings.table, half.root
        products = {
            (site.op, site.module or "", site.location, site.names)
            for site in half.inspector.sites.values()
            if site.dtype in HALF_DTYPES and any(_casts_to_half(table, name) for name in site.names)
        }
        found_entries: list[tuple[int, bool, Entry]] = []
        paths = dict(root.named_modules())
        path = found.module if found.module in paths else None
        while path:
            cls = type(paths[path])
            name = f"{cls.__module__}.{cls.__qualname__}"
            if not name.startswith("torch.") and "<" not in name:
                own = [one for one, module in paths.items() if isinstance(module, cls)]
                lost = sum(any(_is_within(at, one) for one in own) for _, at, _, _ in products)
                found_entries.append((lost, False, Entry((name,), of_module=True)))
            path = path.rpartition(".")[0]
        if found.fp32_names:
            lost = sum(bool(set(names) & set(found.fp32_names)) for _, _, _, names in products)
            found_entries.append((lost, True, Entry(found.fp32_names, of_module=False)))
        found_entries.sort(key=lambda one: one[:2])
        return [entry for lost, _, entry in found_entries if lost < len(products) or not products]

    @contextlib.contextmanager
    def _in_force(self, entry: Entry, root: Module) -> Iterator[None]:
        """Run modules within a ``with`` statement as if the lists had an entry."""
        with contextlib.ExitStack() as stack:
            if entry.of_module:
                for module in root.modules():
                    if any(f"{base.__module__}.{base.__qualname__}" == entry.names[0] for base in type(module).__mro__):
                        stack.enter_context(self._handle.precisions.override(module, "fp32"))
            else:
                stack.enter_context(_InFp32(entry.names))
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


def _probe(tensor: Tensor) -> Tensor:
    """Return gradients of all sizes from -1 to 1 for an output."""
    return torch.linspace(-1.0, 1.0, tensor.numel(), device=tensor.device).view_as(tensor)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _is_half(site: Site | None) -> bool:
    return site is not None and site.dtype in HALF_DTYPES


def _casts_to_half(table: Any, name: str) -> bool:
    rule = table.policy_of(name)
    return rule is not None and rule.policy is CastPolicy.FP16


def _is_within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float(), dtype=torch.float64))


def _vanishing(watch: Backward, results: Mapping[str, Tensor]) -> Site | None:
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
    verdict = HalfPrecisionOp(sizes, _short(site.dtype), site.in_cast)
    return Overflow(
        verdict, op=site.op, module=site.module, location=_line(site), phase=phase, value=value, fp32_names=site.names
    )


def _place(site: Site) -> str:
    parts = (site.op, f"in module {site.module}" if site.module else "", f"at {_line(site)}" if site.location else "")
    return " ".join(part for part in parts if part)


def _line(site: Site) -> str | None:
    file, _, line = (site.location or "").rpartition(":")
    return f"{shown_file(file)}:{line}" if file else site.location


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(sizes: Sequence[float]) -> str:
    return " and ".join(f"{size:.3g}" for size in sizes)
