"""Why a step was skipped: each skip explained, by the tape of the step, which runs again by itself.

`OverflowTrace` explains a skip at once, before the program goes on. A step that was not recorded is not explained: the
steps after it are recorded, until one is clean.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoamp.core import (
    CastPolicy,
    CastRule,
    DynamicLossScaler,
    Guards,
    Listener,
    LossScaler,
    StaticLossScaler,
    Step,
    StepHistory,
    listen,
    reached_by,
    scaled_loss,
    several_processes,
)
from autoamp.errors import kind_of
from autoamp.tools.capsule import CapsuleWriter
from autoamp.tools.findings import Entry, advice_without_lists, by_communication, explain_tape, unlocated
from autoamp.tools.inferences import Inferences
from autoamp.tools.kept_state import KeptState
from autoamp.tools.observer import Observation
from autoamp.tools.origins import Followed, nonfinite_value
from autoamp.tools.step_recorder import WATCHED_STEPS, RecordedStep, StepRecorder, unwrapped
from autoamp.tools.tables import counted
from autoamp.tools.tape import CannotRerun, Tape
from autoamp.tools.verdicts import NotLocated, Overflow, ScaleSearch, ScaleTooHigh
from autoamp.torch_private import compiler_callback, undisturbed

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_CATCH = "init(trace_overflow=True), or autoamp run --trace-overflow, records every step, and names the op that made it"


class OverflowTrace(Listener):
    """Explains skips, and steps without a loss scale whose gradients hold inf or nan.

    Args:
        optimizers: Those of the handle, whose steps are explained.
        observation: The observers of patched functions. They see nothing of what runs again.
        rules: The rules in force.
        always: Whether all steps are recorded. Else those after a skip are.

    Attributes:
        always, observation: As given.
        all: The overflows, the last `keeps`.
        listeners: Called with each skip that was explained.
        capsules: Writes capsules of located overflows; None if nobody asked for them.
    """

    keeps = 1000

    def __init__(
        self, optimizers: Guards, observation: Observation, rules: Iterable[CastRule] = (), *, always: bool
    ) -> None:
        self.always = always
        self.observation = observation
        self.all: deque[Overflow] = deque(maxlen=self.keeps)
        self._rules = rules
        self._optimizers, self._casts = optimizers, optimizers.casts
        if always:
            explain = functools.partial(self._found, self._look_at_outputs, scale=1.0)
            self.recorder.inferences = Inferences(self.recorder, explain)
        self.listeners: list[Callable[[Overflow], object]] = []
        self.capsules: CapsuleWriter | None = None
        optimizers.listeners.add(self)

    @functools.cached_property
    def recorder(self) -> StepRecorder:
        """Records tapes of steps. It is made when the first is to be recorded."""

        def no_list_acts() -> bool:
            # Where the program casts by itself no list does; what it is told then is no entry.
            return bool(self._casts.thread.mode.forced_off) and self._casts.yielded_to is None

        return StepRecorder(self._optimizers.listeners, always=self.always, no_list_acts=no_list_acts)

    @functools.cached_property
    def _halves(self) -> dict[str, bool]:
        """By the bare name of an op that computes in half, whether it casts to it."""
        halves = {CastPolicy.FP16: True, CastPolicy.HALF_IF_MIXED: False}
        return {rule.target.rpartition(".")[2]: halves[rule.policy] for rule in self._rules if rule.policy in halves}

    @property
    def last(self) -> Overflow | None:
        """The last overflow; None before the first."""
        return self.all[-1] if self.all else None

    @property
    def repeated(self) -> list[str]:
        """A sentence for each cause that was logged once, and made inf or nan in more steps."""
        counts = Counter(one.place for one in self.all if type(one.verdict) is not ScaleSearch)
        causes = {one.place: one.cause for one in reversed(self.all)}
        return [
            f"{causes[place]}: in {counted(count - 1, 'more step')}" for place, count in counts.items() if count > 1
        ]

    # -- what steps tell --

    def step_skipped(self, history: StepHistory, step: Step) -> Overflow | None:
        """Explain a skip, if the step was recorded. The next steps are, until one is clean."""
        scaler, scale, late, recorded = step.skipped_by, step.scale, step.is_late, self.recorder.step
        if not isinstance(scaler, LossScaler) or (not recorded.is_recorded and _within_compiler()):
            return None
        # The next scale is not that of a skip that is known late, and its losses are gone.
        is_fixed = not late and _cannot_fall(scaler, scale)
        is_failure = is_fixed or scale == 1.0 or (not late and self._optimizers.steps.loss_is_nonfinite)
        if not recorded.is_recorded and not is_failure:
            # As a rule a search for the scale.
            self.recorder.watch(history)
            return None
        found = self._explain_step(recorded, scale, late)
        if is_fixed:
            found = _too_high(found, scaler, scale)
        # Each cause is logged once, and once to those who asked that the scale is being searched.
        is_search = type(found.verdict) is ScaleSearch
        is_known = any(type(one.verdict) is ScaleSearch if is_search else one.place == found.place for one in self.all)
        level = logging.INFO if is_known or (is_search and not self.always) else logging.WARNING
        number = None if late else self._optimizers.steps.all - 1
        found = self.with_lists(found)
        found = replace(found, loss_scale=None if math.isnan(scale) else scale, iteration=number)
        found = self._noted(found, late, level, history, at_any_scale=is_failure)
        for listener in list(self.listeners):
            listener(found)
        return found

    def step_nonfinite(self, number: int, *, late: bool) -> Overflow | None:
        """Explain a step that no loss scale guards, if it was recorded."""
        if late or not self.recorder.step.is_recorded:
            return None
        found = self.with_lists(replace(self._explain_step(self.recorder.step, 1.0, late), iteration=number))
        return self._noted(found, late, logging.DEBUG, None)

    def with_lists(self, found: Overflow) -> Overflow:
        """Return a finding with what to do in place of its entry, if the program casts by itself."""
        entry = Entry(found.fp32_names, found.fp32_module)
        if self._casts.yielded_to is None or entry == Entry():
            return found
        advice = advice_without_lists(entry, self._casts.yielded_to, self._casts.device_type)
        return replace(found, suggestion=advice, fp32_names=(), fp32_module=None)

    def _noted(
        self, found: Overflow, late: bool, level: int, history: StepHistory | None, *, at_any_scale: bool = False
    ) -> Overflow:
        watches = history is not None and not self.always
        if isinstance(found.verdict, NotLocated):
            verdict = replace(found.verdict, watched=WATCHED_STEPS if watches else 0, at_any_scale=at_any_scale)
            found = replace(found, verdict=verdict)
        if watches:
            self.recorder.watch(history)
        self.all.append(found)
        log.log(level, "%s", found)
        # The tape of a step whose overflow is known late is gone by then.
        if self.capsules is not None and not late:
            self.capsules.write(found, lambda: self.tape_of(self.recorder.step, found.loss_scale or 1.0))
        return found

    # -- finding it --

    def tape_of(self, step: RecordedStep, scale: float) -> Tape:
        """Return the tape of a step, by which a verdict is found also on another machine.

        Args:
            step: The step, which recorded its operators.
            scale: The loss scale of the step.

        Raises:
            CannotRerun: The step was not recorded.
        """
        self.recorder.stop()
        tape = step.tape
        tape.scale, tape.half_dtype, tape.halves = scale, self._casts.dtype, self._halves
        with undisturbed():
            tape.named = () if tape.incomplete else step.named()
        return tape

    def _explain_step(self, step: RecordedStep, scale: float, late: bool) -> Overflow:
        """Explain a step by its tape."""
        if late:
            return unlocated("the device reported the overflow after later steps had begun")
        if step.is_recorded:
            return self._found(self._look_at_tape, step, scale)
        why = "the step was not recorded"
        if self._optimizers.steps.loss_is_nonfinite:
            why += ", and its loss was inf or nan before the backward pass"
        return replace(unlocated(why), suggestion=_CATCH)

    def _found(self, look: Callable[[RecordedStep, float], _T], step: RecordedStep, scale: float) -> _T | Overflow:
        """Return what a look at a step finds. No exception of it ends the program."""
        try:
            with self.observation.quietly():
                return look(step, scale)
        except CannotRerun as error:
            return unlocated(str(error))
        except Exception as error:
            log.debug("a step could not run again", exc_info=True)
            return unlocated(f"running the step again raised {type(error).__name__}: {error}")

    def _look_at_tape(self, step: RecordedStep, scale: float) -> Overflow:
        with self._casts.switched(False, forced_off=True):
            found = explain_tape(self.tape_of(step, scale))
        if isinstance(found.verdict, NotLocated) and several_processes():
            is_wrapped = any(unwrapped(module) is not module for module, _, _ in step.models)
            return by_communication() if is_wrapped else found
        return found

    def _look_at_outputs(self, step: RecordedStep, scale: float) -> Overflow | None:
        """Explain inf or nan in the outputs of a call, which are its losses; None if it was written on purpose."""
        half = Followed(self.tape_of(step, scale))
        origins = [origin for ref in step.loss_refs if (origin := half.origin_of(ref)) is not None]
        # As in masked scores that a model returns.
        return None if all(one.intended for one in origins) else self._look_at_tape(step, scale)

    def explain_loss(self, compute_loss: Callable[[], Any], scale: float) -> Overflow | None:
        """Return the first overflow of a loss and its gradients; see `autoamp.core.Handle.explain_overflow`.

        Args:
            compute_loss: Returns the loss.
            scale: The loss scale.
        """
        why = None
        with self.apart() as state, self.recorder.one_step() as step:
            try:
                with self.recorder.loss_only():
                    loss = compute_loss()
                    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                        what = f"returned {kind_of(loss)}, not a tensor of one element with a graph"
                        self.recorder.refuse_in_loss(what)
                self.recorder.loss_scaled(loss, 1.0)
                try:
                    root = scaled_loss(loss, scale)
                    leaves = reached_by([root])[0]
                    with self.recorder.backward_begun(None):
                        grads = torch.autograd.grad(root, leaves, retain_graph=True, allow_unused=True)
                    step.grads = dict(zip(leaves, grads, strict=True))
                except RuntimeError as error:
                    # As that of some checkpoints.
                    first = str(error).partition("\n")[0]
                    why = f"the backward pass raised {type(error).__name__}: {first}"
            finally:
                # With everything as it was before, the tape runs again from there.
                self.recorder.stop()
                step.tape.undo()
                state.restore()
            if nonfinite_value(loss, *step.grads.values()):
                found = replace(self._found(self._look_at_tape, step, scale), loss_scale=scale)
                scaler = self._optimizers.loss_scalers.latest[0]
                is_static = isinstance(scaler, StaticLossScaler) and scaler.loss_scale == scale
                return _too_high(found, scaler, scale) if is_static else found
        return None if why is None else replace(unlocated(why), loss_scale=scale)

    @contextlib.contextmanager
    def apart(self, *, hooked: bool = True) -> Iterator[KeptState]:
        """Run modules within a ``with`` statement: nothing of it is recorded, observed, or left behind.

        Args:
            hooked: Whether to keep the state of each module that is called. A hook of all modules disturbs compilers.
        """
        state, paused = KeptState(), self.recorder.paused
        self.recorder.paused = True
        self._casts.cache.clear()
        keeps = listen(module_called=(lambda module, inputs: state.keep(module)) if hooked else None)
        try:
            with self.observation.only(), torch.enable_grad():
                yield state
        finally:
            keeps.close()
            state.restore()
            self._casts.cache.clear()
            self.recorder.paused = paused


def _within_compiler() -> bool:
    """Whether torch.compile is at work: what records and explains would be compiled, again and again."""
    return torch.compiler.is_dynamo_compiling() or compiler_callback()


def _cannot_fall(scaler: LossScaler, scale: float) -> bool:
    """Whether a scaler goes no lower than a scale by which gradients overflowed."""
    is_lowest = not isinstance(scaler, DynamicLossScaler) or scaler.loss_scale <= scaler.min_loss_scale
    return scaler.loss_scale >= scale and is_lowest


def _too_high(found: Overflow, scaler: LossScaler, scale: float) -> Overflow:
    """Return a finding which says that a scale is too high that goes no lower, where a lower one would do."""
    if not isinstance(found.verdict, ScaleSearch):
        return found
    finite_at = found.verdict.finite_at
    below = f"lower than {scale:g}" if finite_at is None else f"at most {finite_at:g}"
    remedy = f"use a dynamic loss scale, or a static one of {below}"
    if isinstance(scaler, DynamicLossScaler):
        remedy = f"let min_loss_scale be {below}"
    return replace(found, verdict=ScaleTooHigh(finite_at), suggestion=remedy)
