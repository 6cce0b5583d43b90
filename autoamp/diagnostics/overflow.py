"""Why a step was skipped: each skip explained, by running what was recorded of the step again.

`OverflowTrace` looks on as losses are scaled and optimizers step. While steps are clean it keeps references and sums; a
skip it explains at once, before the program goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.capsule import CapsuleWriter
from autoamp.diagnostics.inspector import flaw_of, worst_of
from autoamp.diagnostics.records import Record, RecordedStep, Recorder
from autoamp.diagnostics.replay import CannotReplay, RecordedCall, kept_state, unfit, unwrapped
from autoamp.diagnostics.verdicts import Communication, NotFiniteInFp32, NotLocated, Overflow, ScaleSearch
from autoamp.stepping import Skips, several_processes
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import compiler_callback

__all__ = ["OverflowTrace"]

log = logging.getLogger(__name__)

# After a step whose overflow was not located, or lies outside of modules, so many steps are watched.
WATCHED_STEPS = 8
# A search for the loss scale takes two skips in a row where a scale has held: at twice that, and at itself. Where none
# has held the search begins at 2**16, and as a rule ends above this.
_SEARCHES, _LOW_SCALE = 2, 2.0**10
_NOTHING = RecordedStep()


class OverflowTrace:
    """Explains skips, and steps without a loss scale whose gradients hold inf or nan.

    Args:
        casts: How threads cast.
        unobserved: Keeps observers from seeing what runs within a ``with`` statement.
        always: Whether all steps are recorded. Else some are, after a skip that is no search for the loss scale.

    Attributes:
        always: As given.
        all: The overflows, the last `keeps`.
        recorder: Keeps what a step that failed is run again from.
        listeners: Called with each skip that was explained.
        capsules: Writes capsules of located overflows; None if nobody asked for them.
        unscaled: The losses of the step at hand at a scale of 1.
    """

    keeps = 1000

    def __init__(
        self,
        casts: Casts,
        unobserved: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        always: bool = True,
    ) -> None:
        self.always = always
        self._casts = casts
        self._unobserved = unobserved
        self.all: list[Overflow] = []
        self.recorder = Recorder(casts, armed=always)
        self.listeners: list[Callable[[Overflow], object]] = []
        self.capsules: CapsuleWriter | None = None
        self.unscaled: list[Tensor] = []
        self._steps = 0
        self._watched = 0
        self._judged = self._earlier = _NOTHING
        # Of optimizers whose steps were heard of.
        self._several: weakref.WeakSet[Skips] = weakref.WeakSet()
        # An overflow of the first step is located in it.
        self.recorder.ops.armed = always

    @property
    def last(self) -> Overflow | None:
        """The last overflow; None before the first."""
        return self.all[-1] if self.all else None

    @property
    def wants_flags(self) -> bool:
        """Whether verdicts are to be read at each step, since an overflow was not located in time."""
        return self._watched > 0

    def close(self) -> None:
        """Drop what was recorded: the handle is no longer active."""
        self.recorder.close()
        self._judged = self._earlier = _NOTHING

    # -- what steps tell; see `autoamp.stepping.StepWatch` --

    def loss_scaled(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Hear of a loss whose backward pass is about to run."""
        self.recorder.note_loss(loss, scale)

    def step_begins(self) -> None:
        """Hear that an optimizer is called: what was recorded is of its step."""
        self._steps += 1
        self.unscaled = self.recorder.unscaled
        # With several optimizers a part of what this one steps by may have been computed before the last step.
        self._earlier = self._judged if len(self._several) > 1 else _NOTHING
        self._judged = self.recorder.take()
        if self.recorder.ops.armed:
            self._watch(max(0, self._watched - 1))

    def step_known(
        self, skips: Skips, skipped: bool, scale: float | None, next_scale: float | None, late: bool
    ) -> Overflow | None:
        """Hear what became of a step, and explain it if it was a skip; see `autoamp.stepping.StepWatch`."""
        if skips not in self._several:
            self._several.add(skips)
        if not skipped or scale is None:
            if not late and len(self._several) < 2:
                self._judged = _NOTHING
            return None
        if not self.recorder.armed:
            if torch.compiler.is_dynamo_compiling() or compiler_callback():
                # What records and explains would be compiled, again and again.
                return None
            fixed = next_scale is not None and next_scale >= scale
            searched = skips.in_a_row > _SEARCHES and (scale <= _LOW_SCALE or skips.has_held)
            if fixed or searched:
                self._watch(WATCHED_STEPS)
            return None
        found = self._found(scale, late)
        if isinstance(found.verdict, ScaleSearch) and next_scale is not None and next_scale >= scale:
            found = self._at_fixed_scale(found, scale)
        # Whoever did not ask is told of each cause once.
        again = not self.always and self.last is not None and self.last.place == found.place
        found = replace(found, loss_scale=None if math.isnan(scale) else scale)
        quiet = again or isinstance(found.verdict, ScaleSearch)
        return self._noted(found, late, logging.INFO if quiet else logging.WARNING, self.listeners)

    def step_not_finite(self, late: bool = False) -> Overflow | None:
        """Explain a step that no loss scale guards; see `autoamp.stepping.StepWatch`."""
        if not self.recorder.armed:
            self._watch(WATCHED_STEPS)
            return None
        return self._noted(self._found(1.0, late), late, logging.DEBUG, ())

    def _watch(self, steps: int) -> None:
        """Watch so many steps; 0 goes back to what is recorded always."""
        self._watched = steps
        self.recorder.ops.armed = steps > 0
        self.recorder.armed = self.always or steps > 0

    def _found(self, scale: float, late: bool) -> Overflow:
        try:
            return self._late() if late else self._explain(scale)
        except Exception as error:
            # Whatever it is, the program goes on as without anybody who looks.
            log.debug("the overflow could not be explained", exc_info=True)
            return self._unlocated(f"explaining it raised {type(error).__name__}: {error}")

    def _noted(
        self, found: Overflow, late: bool, level: int, listeners: Sequence[Callable[[Overflow], object]]
    ) -> Overflow:
        found = replace(found, iteration=None if late else self._steps - 1)
        try:
            self._note(found)
            log.log(level, "%s", found)
            for listener in list(listeners):
                listener(found)
            self._write_capsule(found)
        finally:
            if not late:
                self._judged = _NOTHING
        return found

    def records_of_step(self) -> Sequence[Record]:
        """Return what was recorded of the step at hand: one that is about to be taken, or was skipped just now."""
        return self.recorder.records or self._judged.records

    def _note(self, found: Overflow) -> None:
        goes_on = not self.always and not isinstance(found.verdict, ScaleSearch)
        if isinstance(found.verdict, NotLocated) or found.module is None or goes_on:
            self._watch(WATCHED_STEPS)
        self.all.append(found)
        del self.all[: -self.keeps]

    def _write_capsule(self, found: Overflow) -> None:
        """Write a capsule if asked for. The records of a step whose overflow is known late are gone by then."""
        if self.capsules is not None and found.iteration is not None and self.capsules.wants(found):
            records, scale = [*self._earlier.records, *self._judged.records], found.loss_scale or 1.0
            self.capsules.write(found, self.explain_records(records, scale), records, scale)

    def _late(self) -> Overflow:
        return self._unlocated("the device reported the overflow after later steps had begun")

    def _at_fixed_scale(self, found: Overflow, scale: float) -> Overflow:
        """Return the finding for a scale that is too large and does not move."""
        if found.op is None:
            return self._unlocated("gradients of the loss overflow in half precision; its ops were not watched")
        lower = None if not isinstance(found.verdict, ScaleSearch) else found.verdict.finite_at
        below = f"at most {lower:g}" if lower is not None else f"lower than {scale:g}"
        return replace(found, suggestion=f'use loss_scale="dynamic", or a static scale of {below}')

    def _unlocated(self, why: str) -> Overflow:
        return Overflow(NotLocated(why, watched=WATCHED_STEPS))

    # -- finding it --

    def _explain(self, scale: float) -> Overflow:
        records = [*self._earlier.records, *self._judged.records]
        found = self.explain_records(records, scale, self._judged)
        if found is None and several_processes() and any(_reduces(record.module()) for record in records):
            return Overflow(Communication())
        return found or self._unlocated(
            "run again, the step gave finite gradients" if records else "no call of a module was recorded in this step"
        )

    def explain_records(self, records: list[Record], scale: float, step: RecordedStep = _NOTHING) -> Overflow | None:
        """Return what made inf or nan; None if all gradients of this rank are finite.

        Args:
            records: The calls to run again.
            scale: The loss scale.
            step: What is known beside the calls.
        """
        try:
            return self._locally(records, step, scale)
        except CannotReplay as error:
            return self._unlocated(str(error))
        except Exception as error:
            log.debug("the step could not be run again", exc_info=True)
            return self._unlocated(f"running the step again raised {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def apart(self, records: Iterable[Record]) -> Iterator[None]:
        """Run modules again within a ``with`` statement: nothing of it is recorded, observed, or left behind."""
        modules = [module for record in records if (module := record.module()) is not None]
        paused, self.recorder.paused = self.recorder.paused, True
        self._casts.cache.clear()
        try:
            with self._unobserved(), kept_state(modules):
                yield
        finally:
            self._casts.cache.clear()
            self.recorder.paused = paused

    def _locally(self, records: list[Record], step: RecordedStep, scale: float) -> Overflow | None:
        """Return the finding of this rank; None where its own gradients are finite."""
        with self.apart(records):
            in_loss = None if step.ops is None else step.ops.forward_finding() or step.ops.backward_finding()
            if in_loss is not None and isinstance(in_loss.verdict, ScaleSearch):
                return in_loss
            for record in records:
                if record.passes:
                    found = RecordedCall(record, self._casts, scale).forward_finding()
                    if found is not None:
                        return self._from_before(records, step, record, found, scale)
            found = in_loss or self._backward(records, step, scale)
            if found is None or found.phase == "forward":
                # Now what is harmless as a rule: outputs without gradients, and -inf that may be on purpose.
                found = self._suspect(records, step, records, scale) or found
            return found

    def _from_before(
        self, records: list[Record], step: RecordedStep, record: Record, found: Overflow, scale: float
    ) -> Overflow:
        """Return the finding, or where inf or nan came in by an input, that of the call whose output it was."""
        if not isinstance(found.verdict, NotFiniteInFp32) or found.verdict.cause != "data":
            return found
        flawed = [one for one, _ in record.versions if flaw_of(one) is not None]
        for one in flawed if step.ops is not None else []:
            if (between := step.ops.finding_of(one)) is not None:  # type: ignore[union-attr]
                return between
        computed = [one for one in flawed if id(one) in record.wanted]
        before = [one for one in records if one.number < record.number]
        earlier = self._suspect(records, step, before, scale)
        if earlier is not None or not computed:
            return earlier or found
        # A gradient goes back to it: as a rule another op computed it, so it is not called data.
        return self._unlocated(
            f"the input {found.verdict.tensor} of {found.module} holds {found.value} already, and the op that made it "
            "was not recorded; use explain_overflow()"
        )

    def _suspect(self, records: list[Record], step: RecordedStep, among: list[Record], scale: float) -> Overflow | None:
        for record in among:
            module = record.module()
            if module is not None and unfit(module) is None:
                found = RecordedCall(record, self._casts, scale).suspect()
                if found is not None:
                    return self._from_before(records, step, record, found, scale)
        return None

    def _backward(self, records: list[Record], step: RecordedStep, scale: float) -> Overflow | None:
        if worst_of(step.losses) is not None:
            return self._unlocated("the loss is inf or nan, and its ops were not watched in this step")
        for record in reversed(records):
            if record.too_large:
                raise CannotReplay("the gradients at the outputs are too large to keep; use explain_overflow()")
            for loss in record.passes:
                flaw = worst_of(arrived := record.gradients_of(loss))
                if flaw is None:
                    found = RecordedCall(record, self._casts, scale).backward_finding(loss)
                    if found is not None:
                        return self._from_before(records, step, record, found, scale)
                elif scale > 1.0 and not flaw.nan and worst_of([one for one in arrived if not _is_half(one)]) is None:
                    # What no half tensor can hold. If a lower scale does not mend it, the next step tells.
                    return Overflow(ScaleSearch(), phase="backward")
                else:
                    return self._unlocated(
                        f"the gradients hold {flaw.value} where they come to {_name_of(record)}, and the ops between "
                        "its call and the loss were not watched in this step"
                    )
        return None


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF_DTYPES


def _name_of(record: Record) -> str:
    return type(record.module()).__name__


def _reduces(module: Module | None) -> bool:
    return module is not None and unwrapped(module) is not module
