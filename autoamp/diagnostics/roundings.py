"""Ops that make a step wrong in half precision without any inf: the tape in half precision beside the tape in fp32.

Each half op rounds its results, in bf16 to about 2**-9, and most programs do not notice. Some ops enlarge such an
error: the sine of an angle of 3000, or 1 - p of a p close to 1. They are those whose results are far from fp32 while
what they read is not. The error comes from the half ops that made what they read. The tape runs again with these in
fp32, and they are told if that removes most of the error of the gradients or the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autoamp.diagnostics.entries import (
    Choice,
    Entry,
    half_ops_before,
    in_fp32_with,
    is_half,
    is_product,
    keeps_products,
    module_entries,
)
from autoamp.diagnostics.origins import Evidence
from autoamp.diagnostics.ranges import relative_error
from autoamp.tape import Op, Rerun, Tape, everything, iter_refs
from autoamp.tensors import dtype_name, iter_tensors

# Ops are looked for if a step is off by so many units in the last place of the half dtype, and by this part.
_FAR_UNITS, _FAR = 16, 0.02
# The results of an op that enlarges an error are off by so many units, and so many times as far as what it reads.
_LARGE_UNITS, _TIMES = 8, 4.0
# Ops and entries are told if at most so much of the error is left with them in fp32.
_LEFT = 1 / 3
# Gradients below this part of the largest one differ in any precision.
_SMALL = 1e-3
# So many ops that enlarge errors are looked at, and so many lines before each.
_MAX_OPS, _MAX_LINES = 3, 4


@dataclass(frozen=True)
class Errors:
    """How far a step is from fp32; ``str()`` says so. An error is the 2-norm of the difference, as a part of fp32's.

    Attributes:
        parameters: That of each parameter's gradient, but for those that are too small to tell.
        loss: That of the losses.
    """

    parameters: dict[str, float]
    loss: float

    @property
    def gradients(self) -> float:
        """The root of the mean square over the parameters, none of them above 1."""
        squares = [min(error, 1.0) ** 2 for error in self.parameters.values()]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def __str__(self) -> str:
        worst = max(self.parameters, key=self.parameters.__getitem__, default=None)
        of_worst = "" if worst is None else f" (of {worst} by {_percent(self.parameters[worst])})"
        return f"the gradients are off by {self.gradients:.1%}{of_worst} and the loss by {_percent(self.loss)}"


@dataclass(frozen=True)
class Rounding:
    """Ops whose rounding makes most of the error of a step. ``str()`` of it is a sentence.

    Attributes:
        ops: For each its function, the path of its module and its line. The module is None if there are several.
        dtype: The half dtype.
        own_error: How far the result of the first is from fp32, computed from the same half inputs.
        errors: Those of the step.
        share: How much of the error in the gradients, or else in the loss, is gone with them in fp32.
        entry: The entry of a list that does that; None if none was found.
    """

    ops: tuple[tuple[str | None, str | None, str | None], ...]
    dtype: str
    own_error: float
    errors: Errors
    share: float
    entry: Entry | None

    @property
    def remedy(self) -> str:
        """What to do."""
        if self.entry is None:
            return "compute these lines in fp32; no entry of a list was found that does"
        return self.entry.advice()

    def __str__(self) -> str:
        named = [
            f"{op}{f' in module {module}' if module else ''}{f' at {line}' if line else ''}"
            for op, module, line in self.ops
        ]
        rounds = "round" if len(named) > 1 else "rounds"
        return (
            f"{' and '.join(named)} {rounds} to {self.dtype}, by {self.own_error:.2%}, and later ops enlarge that: "
            f"{self.errors}, and {self.share:.0%} of that comes from here"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        entry = self.entry or Entry()
        return {
            "ops": [dict(zip(("op", "module", "location"), one, strict=True)) for one in self.ops],
            "sentence": str(self), "remedy": self.remedy, "own_error": self.own_error, "share": self.share,
            "gradient_error": self.errors.gradients, "loss_error": self.errors.loss,
            "fp32_names": list(entry.names), "fp32_module": entry.module,
        }  # fmt: skip


def _percent(error: float) -> str:
    return f"{error:.1%}" if error < 10.0 else "more than 1000%"


def errors_of(step: Evidence, run: Rerun, wide: Rerun) -> Errors:
    """Return the errors of a run beside a run in fp32, both ended."""
    grads = [
        (name, half, full, float(full.square().mean().sqrt())) for name, half, full in step.values("grad", run, wide)
    ]
    least = _SMALL * max((size for *_, size in grads), default=0.0)
    found = {name: relative_error(half, full) for name, half, full, size in grads if size > least}
    losses = [relative_error(half, full) for _, half, full in step.values("loss", run, wide)]
    return Errors(found, max(losses, default=0.0))


class _Line(NamedTuple):
    """Calls of a function at a line of the program: in one module, or in all if that is None."""

    function: str | None
    location: str | None
    module: str | None

    def has(self, op: Op) -> bool:
        """Whether an op is such a call."""
        place = op.place
        same = (place.function, place.location) == (self.function, self.location)
        return same and not place.is_cast and self.module in (None, place.module)


def _line_of(tape: Tape, op: Op) -> _Line:
    """Return the line of an op. Layers with weights are told apart, as one line may call several."""
    place = op.place
    in_torch = bool(place.classes) and place.classes[-1].startswith("torch.")
    is_layer = is_product(op) and any(one.phase == "backward" and one.place is place for one in tape.ops)
    return _Line(place.function, place.location, place.module if in_torch or is_layer else None)


def find_rounding(step: Evidence, errors: Errors, wide: Rerun) -> Rounding | None:
    """Return the ops whose rounding makes most of the error of a step; None if the error is small, or no ops do.

    Args:
        step: The step, whose gradients are finite.
        errors: Its errors.
        wide: Its run in fp32, which has ended.

    Raises:
        CannotRerun: The step cannot run again.
    """
    unit = torch.finfo(step.half_dtype).eps
    far = max(_FAR_UNITS * unit, _FAR)
    if max(errors.gradients, errors.loss) < far:
        return None
    in_gradients = errors.gradients >= far

    def left(has: Choice, within: bool = False) -> float:
        run = Rerun(step.tape, in_fp32_with(step.tape, has, within=within)).finish()
        rest = errors_of(step, run, wide)
        return rest.gradients / errors.gradients if in_gradients else rest.loss / errors.loss

    for op in itertools.islice(_enlarging(step.tape, unit), _MAX_OPS):
        before = [op] if is_half(op) else []
        before += [one for one in half_ops_before(step.tape, op) if one.phase == "forward" and not one.place.is_cast]
        lines = list(dict.fromkeys(_line_of(step.tape, one) for one in before))[:_MAX_LINES]
        found = _fewest(lines, left)
        # Close to its minimum a model of one layer has gradients of nothing but rounding.
        if found is None or not keeps_products(step.tape, chosen := _any_of(found)):
            continue
        ops, named = [one for one in before if chosen(one)], []
        for line in found:
            modules = {one.place.module for one in ops if line.has(one)}
            named.append((line.function, modules.pop() if len(modules) == 1 else None, line.location))
        share, own_error = 1.0 - left(chosen), _own_error(step.tape, ops[0])
        entry = _entry_for(step.tape, ops, left)
        return Rounding(tuple(named), dtype_name(step.half_dtype), own_error, errors, share, entry)
    return None


def _any_of(lines: list[_Line]) -> Choice:
    return lambda op: any(line.has(op) for line in lines)


def _fewest(lines: list[_Line], left: Callable[[Choice], float]) -> list[_Line] | None:
    """Return the first lines that remove most of the error if they are in fp32, without those that are not needed."""
    for number in range(1, len(lines) + 1):
        if left(_any_of(found := lines[:number])) <= _LEFT:
            for line in found[:-1]:
                rest = [one for one in found if one is not line]
                found = rest if left(_any_of(rest)) <= _LEFT else found
            return found
    return None


def _entry_for(tape: Tape, ops: list[Op], left: Callable[[Choice, bool], float]) -> Entry | None:
    """Return the first entry that removes most of the error."""
    names = tuple(dict.fromkeys(name for op in ops for name in op.place.names))
    entries: list[Entry] = [*([Entry(names)] if names else ()), *module_entries(ops[-1])]
    for entry in entries:
        if keeps_products(tape, entry.acts_on) and left(entry.acts_on, entry.module is not None) <= _LEFT:
            return entry
    return None


def _enlarging(tape: Tape, unit: float) -> Iterator[Op]:
    """Yield the ops of the forward pass whose results are far from fp32 while what they read is not."""
    apart: dict[int, float] = {}
    for (op, _, half), (_, _, full) in zip(Rerun(tape), Rerun(tape, everything), strict=True):
        if op.phase == "backward" or half is None:
            continue
        read = max((apart.get(ref.memory, 0.0) for ref in iter_refs((op.args, op.kwargs))), default=0.0)
        made = max(map(relative_error, iter_tensors(half), iter_tensors(full)), default=0.0)
        apart.update({ref.memory: made for ref in iter_refs(op.outputs)})
        if made > max(_LARGE_UNITS * unit, _TIMES * read):
            yield op


def _own_error(tape: Tape, op: Op) -> float:
    """Return how far the result of an op is from fp32, computed from the same inputs."""
    runs = zip(Rerun(tape), Rerun(tape, lambda other: other is op), strict=True)
    half, full = next((half, full) for (one, _, half), (_, _, full) in runs if one is op)
    return max(map(relative_error, iter_tensors(half), iter_tensors(full)), default=0.0)
