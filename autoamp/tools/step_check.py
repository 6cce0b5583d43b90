"""Compares a step that is about to be taken with the same step in fp32, by its tape.

An op may overflow although every gradient is finite: 1 / inf is 0, and so is each gradient before it. The step is not
skipped. Other ops round: each half op rounds its results, in bf16 to about 2**-9, and most programs do not notice.
Some ops enlarge such an error: the sine of an angle of 3000, or 1 - p of a p close to 1. They are those whose results
are far from fp32 while what they read is not. The error comes from the half ops that made what they read. The tape runs
again with these in fp32, and they are told if that removes most of the error of the gradients or the loss.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoamp.core import CastState
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors
from autoamp.tools.call_sites import CASTS
from autoamp.tools.findings import (
    Entry,
    advice_without_lists,
    half_ops_before,
    half_precision_finding,
    in_fp32_with,
    is_half,
    is_product,
    keeps_products,
    module_entries,
)
from autoamp.tools.half_losses import is_sampled
from autoamp.tools.origins import Errors, Followed, NonFiniteOrigin, errors_of
from autoamp.tools.overflow import OverflowTrace
from autoamp.tools.ranges import relative_error
from autoamp.tools.tables import first_of, placed
from autoamp.tools.tape import Choice, Op, Place, Rerun, Tape, everything, iter_refs
from autoamp.tools.verdicts import Overflow

log = logging.getLogger(__name__)

# From this difference on, as a part of the gradient in fp32, the gradient in half precision is wrong.
_WRONG = 0.5
# Ops are looked for if a step is off by so many units in the last place of the half dtype, and by this part.
_FAR_UNITS, _FAR = 16, 0.02
# The results of an op that enlarges an error are off by so many units, and so many times as far as what it reads.
_LARGE_UNITS, _TIMES = 8, 4.0
# Ops and entries are told if at most so much of the error is left with them in fp32.
_LEFT = 1 / 3
# From this error of the gradients on the lines that make it are looked for, also if they are all of the products.
_MUCH, _MAX_TRIED = 0.1, 24
# So many ops that enlarge errors are looked at, and so many lines before each.
_MAX_OPS, _MAX_LINES = 3, 4


@dataclass(frozen=True)
class Rounding:
    """Ops whose rounding makes most of the error of a step. ``str()`` of it is a sentence.

    Attributes:
        ops: For each its function, the path of its module and its line. The module is None if there are several.
        dtype: The half dtype.
        own_error: How far the result of the first is from fp32, computed from the same half inputs.
        errors: Those of the step.
        share: How much of the error in the gradients, or else in the loss, is gone with them in fp32.
        entry: The entry of a list that does that; an empty one if none was found, or if lists have no effect.
        remedy: What to do.
    """

    ops: tuple[tuple[str | None, str | None, str | None], ...]
    dtype: str
    own_error: float
    errors: Errors
    share: float
    entry: Entry
    remedy: str

    @property
    def place(self) -> str:
        """The ops in words."""
        return " and ".join(placed(str(op), module, line) for op, module, line in self.ops)

    def __str__(self) -> str:
        rounds = "round" if len(self.ops) > 1 else "rounds"
        return (
            f"{self.place} {rounds} to {self.dtype}, by {self.own_error:.2%}, and later ops enlarge that: "
            f"{self.errors}, and {self.share:.0%} of that comes from here"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ops": [dict(zip(("op", "module", "location"), one, strict=True)) for one in self.ops],
            "sentence": str(self), "remedy": self.remedy, "own_error": self.own_error, "share": self.share,
            "gradient_error": self.errors.gradients, "loss_error": self.errors.loss,
            "fp32_names": list(self.entry.names), "fp32_module": self.entry.module,
        }  # fmt: skip


class StepCheck:
    """Compares steps that are about to be taken with fp32, by the tapes that `OverflowTrace` recorded.

    Of a step with a closure that is the first evaluation whose gradients are finite.

    Args:
        overflows: Records the steps. Nothing is compared unless it records all of them.

    Attributes:
        faults: The ops that overflowed in steps that were not skipped, each with what was found in words.
        roundings: The ops that made steps wrong without an overflow, each with the number of the step.
        farthest: The errors of the step whose gradients were farthest from fp32; None if none were compared.
        source: What makes most of those errors, if they are large and no rounding explains them: no fault by itself, as
            close to a minimum all gradients are of rounding. None otherwise.
        unchecked: Why the last step that could not be compared was not; None if all were.
    """

    def __init__(self, overflows: OverflowTrace) -> None:
        self.faults: list[tuple[str, Overflow]] = []
        self.roundings: list[tuple[int, Rounding]] = []
        self.farthest: Errors | None = None
        self.source: Rounding | None = None
        self.unchecked: str | None = None
        self._overflows = overflows
        # The numbers of those that were compared.
        self._steps: set[int] = set()

    @property
    def compared(self) -> int:
        """The number of steps that were compared."""
        return len(self._steps)

    def compare(self, step: int, closure: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
        """Compare the coming step with fp32, if its number, from 0, is 0, 1, 4, 16 and so on.

        Args:
            step: The number.
            closure: What the step is given to make gradients. They may be there all the same, as those of SAM are.

        Returns:
            What is to be called in place of the closure.
        """
        recorder = self._overflows.recorder
        is_awaited = self._overflows.always and (step == 0 or is_sampled(step))
        if is_awaited and (closure is None or recorder.step.has_gradients):
            self._compare_if_possible(step)
            is_awaited = False
        if closure is None:
            return None

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_awaited
            loss = closure(*args, **kwargs)
            recorder.step.in_closure = True
            if is_awaited:
                is_awaited = not self._compare_if_possible(step)
                # What the closure calls next is on a tape of its own.
                recorder.end_step()
            return loss

        return evaluate

    def _compare_if_possible(self, step: int) -> bool:
        """Compare a step; return whether its gradients were finite, or it cannot be compared."""
        try:
            is_finite = self._compare(step)
            self._steps.add(step)
            return is_finite
        except Exception as error:
            # A comparison never ends the program.
            self.unchecked = str(error) or type(error).__name__
            log.debug("a step could not be compared with fp32", exc_info=True)
            return True

    def _compare(self, step: int) -> bool:
        """Find the first op that overflows in half precision, if that changes gradients, or else ops that round.

        Returns:
            Whether gradients are finite.
        """
        observation = self._overflows.observation
        tape = self._overflows.tape_of(self._overflows.recorder.step, 1.0)
        with observation.quietly(), observation.casts.switched(False, forced_off=True):
            half = Followed(tape)
            # If gradients are not finite the step will be skipped, and that overflow is explained.
            if half.at_gradients:
                return False
            wide = Rerun(tape, everything).finish()
            errors = errors_of(half, wide)
            is_farthest = self.farthest is None or errors.gradients > self.farthest.gradients
            if is_farthest:
                self.farthest, self.source = errors, None
            found = (one for one in half.origins if one.op is not None and one.ref.dtype in HALF_DTYPES)
            origins = [one for one in found if not one.intended]
            wrong = [name for name, error in errors.parameters.items() if error > _WRONG]
            search = _Search(tape, errors, wide, observation.casts)
            # An inf may be harmless, and the gradients be wrong by something else.
            is_cause = bool(origins and wrong) and not search.are_harmless(origins, wrong)
            if is_cause:
                overflow = half_precision_finding(origins[0], Followed(tape, everything))
                if overflow.place not in [known.place for _, known in self.faults]:
                    taken = f"the step was taken, and the gradients of {first_of(wrong, 4)} are not those of fp32"
                    overflow_there = self._overflows.with_lists(replace(overflow, iteration=step, parameter=wrong[0]))
                    self.faults.append((f"{overflow.cause}; {taken}", overflow_there))
            rounding = None if is_cause or (origins and not wrong) else search.rounding()
            is_told = rounding is not None or is_cause
            if is_farthest and not is_told and errors.gradients >= _MUCH:
                self.source = search.source()
            if rounding is not None and rounding.ops not in [known.ops for _, known in self.roundings]:
                self.roundings.append((step, rounding))
        return True


def _line_of(tape: Tape, op: Op) -> Place:
    """Return the line of an op: its function and its location, in one module, or in all of them if that is None.

    Layers with weights are told apart, as one line may call several.
    """
    place = op.place
    in_torch = bool(place.classes) and place.classes[-1].startswith("torch.")
    is_layer = is_product(op) and any(one.phase == "backward" and one.place is place for one in tape.ops)
    return Place(place.function, place.module if in_torch or is_layer else None, place.location)


def _is_at(line: Place, op: Op) -> bool:
    """Whether an op is called at a line."""
    place = op.place
    same = (place.function, place.location) == (line.function, line.location)
    return same and not place.is_cast and line.module in (None, place.module)


class _Search:
    """Looks for what has to compute in fp32, so that most of the error of a step is gone.

    Args:
        tape: The step, whose gradients are finite.
        errors: Its errors.
        wide: Its run in fp32, which has ended.
        casts: How the program casts.
    """

    def __init__(self, tape: Tape, errors: Errors, wide: Rerun, casts: CastState) -> None:
        self._tape, self._errors, self._wide, self._casts = tape, errors, wide, casts
        self._halves = [op for op in tape.ops if op.phase == "forward" and not op.place.is_cast and is_half(op)]
        self._of_loss = False

    def rounding(self) -> Rounding | None:
        """Return the ops whose rounding makes most of the error; None if the error is small, or no ops do.

        Raises:
            CannotRerun: The step cannot run again.
        """
        tape, errors = self._tape, self._errors
        unit = torch.finfo(tape.half_dtype).eps
        far = max(_FAR_UNITS * unit, _FAR)
        if max(errors.gradients, errors.loss) < far:
            return None
        self._of_loss = errors.gradients < far
        for op in itertools.islice(_enlarging(tape, unit), _MAX_OPS):
            before = [op] if is_half(op) else []
            before += [one for one in half_ops_before(tape, op) if one.phase == "forward" and not one.place.is_cast]
            found = self._fewest(list(dict.fromkeys(_line_of(tape, one) for one in before))[:_MAX_LINES])
            # Close to its minimum a model of one layer has gradients of nothing but rounding.
            if found is None or not keeps_products(tape, chosen := _any_of(found)):
                continue
            ops, named = [one for one in before if chosen(one)], []
            for line in found:
                modules = {one.place.module for one in ops if _is_at(line, one)}
                named.append((line.function, modules.pop() if len(modules) == 1 else None, line.location))
            entries = _entries_for(ops)
            entry = self._first_that_heals(one for one in entries if keeps_products(tape, one.acts_on))
            if entry is None and errors.gradients >= _MUCH:
                entry = self._first_that_heals((*entries, *self._wide_entries()))
            return self._told(named, ops[0], self._left(chosen), entry)
        return None

    def source(self) -> Rounding | None:
        """Return the lines, or else the module of the program, that make most of the error of the gradients."""
        self._of_loss = False
        lines = list(dict.fromkeys(_line_of(self._tape, op) for op in self._halves))[:_MAX_TRIED]
        rest = {line: self._left(_any_of([line])) for line in lines}
        found = self._fewest(sorted(lines, key=rest.__getitem__)[:_MAX_LINES])
        if found is not None:
            ops = [op for op in self._halves if _any_of(found)(op)]
            named = [(line.function, line.module, line.location) for line in found]
            entry = self._first_that_heals((*_entries_for(ops), *self._wide_entries()))
            left = self._left(_any_of(found))
        else:
            # The class of a module is named in place of a line, or functions are, wherever they are called.
            entry = self._first_that_heals(self._wide_entries())
            if entry is None:
                return None
            ops, left = [op for op in self._halves if entry.acts_on(op)], self._left_with(entry)
            functions = dict.fromkeys(op.place.function for op in ops)
            named = [(one, None, None) for one in ([f"module {entry.module}"] if entry.module else functions)]
        return self._told(named, next(filter(is_product, ops), ops[0]), left, entry)

    def are_harmless(self, origins: Sequence[NonFiniteOrigin], names: Sequence[str]) -> bool:
        """Whether overflows are known to make no error of some gradients: all of it is left with fp32 in their place.

        Args:
            origins: The overflows.
            names: The parameters of these gradients.
        """
        ops = [one.op for one in origins if one.op is not None]
        # No fp32 is in the place of a cast.
        if any(op.place.is_cast or op.place.function in CASTS for op in ops):
            return False
        choice = in_fp32_with(self._tape, _any_of([_line_of(self._tape, op) for op in ops]))
        rest = errors_of(Rerun(self._tape, choice).finish(), self._wide).parameters
        return all(rest[name] > _LEFT * self._errors.parameters[name] for name in names)

    def _told(
        self, named: list[tuple[str | None, str | None, str | None]], first: Op, left: float, entry: Entry | None
    ) -> Rounding:
        remedy = "compute these lines in fp32; no entry of a list was found that does"
        if entry is not None:
            remedy = entry.advice()
            if self._casts.yielded_to is not None:
                remedy = advice_without_lists(entry, self._casts.yielded_to, self._casts.device_type)
                entry = None
        dtype, own_error = dtype_name(self._tape.half_dtype), _own_error(self._tape, first)
        return Rounding(tuple(named), dtype, own_error, self._errors, 1.0 - left, entry or Entry(), remedy)

    def _left(self, has: Choice, *, within: bool = False) -> float:
        """Return how much of the error is left with some operators in fp32; see `in_fp32_with`."""
        run = Rerun(self._tape, in_fp32_with(self._tape, has, within=within)).finish()
        rest = errors_of(run, self._wide)
        return rest.loss / self._errors.loss if self._of_loss else rest.gradients / self._errors.gradients

    def _left_with(self, entry: Entry) -> float:
        return self._left(entry.acts_on, within=entry.module is not None)

    def _first_that_heals(self, entries: Iterable[Entry]) -> Entry | None:
        """Return the first entry that removes most of the error."""
        return next((one for one in entries if self._left_with(one) <= _LEFT), None)

    def _wide_entries(self) -> Iterator[Entry]:
        """Yield entries for modules of the program, the outermost first, then for functions, at last for several."""
        modules = dict.fromkeys(entry for op in self._halves for entry in reversed(module_entries(op)))
        yield from itertools.islice(modules, _MAX_TRIED)
        places = {op.place.names: op.place for op in self._halves if op.place.names}
        several = Entry()
        for place in sorted(list(places.values())[:_MAX_TRIED], key=lambda one: self._left_with(Entry(one.names))):
            yield Entry(place.names)
            several = several.plus(place)
            yield several

    def _fewest(self, lines: list[Place]) -> list[Place] | None:
        """Return the first lines that remove most of the error in fp32, without those that are not needed."""
        for number in range(1, len(lines) + 1):
            if self._left(_any_of(found := lines[:number])) <= _LEFT:
                for line in found[:-1]:
                    rest = [one for one in found if one is not line]
                    found = rest if self._left(_any_of(rest)) <= _LEFT else found
                return found
        return None


def _entries_for(ops: list[Op]) -> list[Entry]:
    """Return the entries that act on some ops: for their names, and for the modules around the last."""
    names = Entry().plus(*(op.place for op in ops))
    return [*([names] if names.names else []), *module_entries(ops[-1])]


def _any_of(lines: list[Place]) -> Choice:
    return lambda op: any(_is_at(line, op) for line in lines)


def _enlarging(tape: Tape, unit: float) -> Iterator[Op]:
    """Yield the ops of the forward pass whose results are far from fp32 while what they read is not."""
    apart: dict[int, float] = {}
    for op, made in _errors_in_fp32(tape, everything):
        read = max((apart.get(ref.memory, 0.0) for ref in iter_refs((op.args, op.kwargs))), default=0.0)
        apart.update({ref.memory: made for ref in iter_refs(op.outputs)})
        if made > max(_LARGE_UNITS * unit, _TIMES * read):
            yield op


def _own_error(tape: Tape, op: Op) -> float:
    """Return how far the result of an op is from fp32, computed from the same inputs."""
    return next(error for one, error in _errors_in_fp32(tape, lambda one: one is op) if one is op)


def _errors_in_fp32(tape: Tape, in_fp32: Choice) -> Iterator[tuple[Op, float]]:
    """Yield the ops of the forward pass with how far their results are from a run in which some are in fp32."""
    for (op, _, half), (_, _, full) in zip(Rerun(tape), Rerun(tape, in_fp32), strict=True):
        if op.phase != "backward" and half is not None:
            yield op, max(map(relative_error, iter_tensors(half), iter_tensors(full)), default=0.0)
