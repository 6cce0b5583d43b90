"""Why a step was skipped: each skip explained, by the tape of the step, which runs again by itself.

`OverflowTrace` looks on as losses are scaled and optimizers step. A skip it explains at once, before the program goes
on. In a step that was not recorded the call of a model that went wrong may run once more; what it writes is undone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from autoamp.auto_scaling import reached_by
from autoamp.casting import CastState
from autoamp.diagnostics.capsule import CapsuleWriter
from autoamp.diagnostics.evidence import Evidence, named_tensors
from autoamp.diagnostics.findings import explain_evidence, unlocated
from autoamp.diagnostics.inferences import Inferences
from autoamp.diagnostics.kept_calls import KeptCall
from autoamp.diagnostics.kept_state import KeptState
from autoamp.diagnostics.observer import Observation
from autoamp.diagnostics.origins import nonfinite_value
from autoamp.diagnostics.outside_calls import key_of
from autoamp.diagnostics.second_calls import why_not_again
from autoamp.diagnostics.step_recorder import RecordedStep, StepRecorder, unwrapped
from autoamp.diagnostics.tables import counted
from autoamp.diagnostics.verdicts import Communication, NotLocated, Overflow, ScaleSearch
from autoamp.errors import kind_of
from autoamp.program import Subscriber, listen
from autoamp.scaling import LossScaler, scaled_loss
from autoamp.stepping import Skips, Step, has_written_masters, several_processes
from autoamp.tape import CannotRerun
from autoamp.torch_private import compiler_callback, current_graph_task, undisturbed

log = logging.getLogger(__name__)

_CATCH = "trace_overflow=True (autoamp run --trace-overflow) records every step, and names the op that made it"

# After a step whose overflow was not located, or lies outside of modules, so many steps are watched.
WATCHED_STEPS = 8
# A search for the loss scale takes two skips in a row where a scale has held: at twice that, and at itself. Where none
# has held the search begins at 2**16, and as a rule ends above this.
_SEARCHES, _LOW_SCALE = 2, 2.0**10


class OverflowTrace(Subscriber):
    """Explains skips, and steps without a loss scale whose gradients hold inf or nan.

    Args:
        casts: How threads cast.
        observation: The observers of patched functions. They see nothing of what runs again.
        always: Whether all steps are recorded. Else some are, after a skip that is no search for the loss scale.

    Attributes:
        always, observation: As given.
        all: The overflows, the last `keeps`.
        recorder: Records tapes of steps.
        listeners: Called with each skip that was explained.
        capsules: Writes capsules of located overflows; None if nobody asked for them.
    """

    keeps = 1000

    def __init__(self, casts: CastState, observation: Observation, *, always: bool) -> None:
        self.always = always
        self._casts = casts
        self.observation = observation
        self.all: deque[Overflow] = deque(maxlen=self.keeps)
        self.recorder = StepRecorder(casts, always=always)
        if always:
            self.recorder.inferences = Inferences(self.recorder, self._explain_outputs, log.warning)
        self.listeners: list[Callable[[Overflow], object]] = []
        self.capsules: CapsuleWriter | None = None
        self._steps = 0
        # Of the optimizers whose steps were heard of.
        self._skips: weakref.WeakSet[Skips] = weakref.WeakSet()

    @property
    def last(self) -> Overflow | None:
        """The last overflow; None before the first."""
        return self.all[-1] if self.all else None

    @property
    def repeated(self) -> list[str]:
        """A sentence for each cause that was logged once, and made inf or nan in more steps."""
        counts = Counter(one.place for one in self.all if not isinstance(one.verdict, ScaleSearch))
        causes = {one.place: one.cause for one in reversed(self.all)}
        return [
            f"{causes[place]}: in {counted(count - 1, 'more step')}" for place, count in counts.items() if count > 1
        ]

    def wants_flags(self) -> bool:
        """Whether the flag of this step is to be read at once, because its ops are watched."""
        return self.recorder.step.is_watched

    @property
    def _is_recorded(self) -> bool:
        return self.always or self.recorder.step.is_watched

    def close(self) -> None:
        """Drop what was recorded: the handle is no longer active."""
        self.recorder.drop()

    # -- what steps tell --

    def backward_begins(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Called with a loss whose backward pass is about to run."""
        self.recorder.refuse_in_loss("scaled a loss")
        self.recorder.note_loss(loss, scale)

    def step_begins(self) -> None:
        """Called when an optimizer is called, which ends the recorded step."""
        self.recorder.refuse_in_loss("called an optimizer")
        self._steps += 1
        self.recorder.end_step()

    def step_known(self, skips: Skips, step: Step) -> Overflow | None:
        """Called once it is known what became of a step; explains a skip."""
        self._skips.add(skips)
        scaler, scale, late = step.skipped_by, step.scale, step.is_late
        if not isinstance(scaler, LossScaler):
            # Another optimizer may step by the same calls, and be skipped.
            if not late and len(self._skips) == 1:
                self.recorder.forget()
            return None
        # The next scale is not that of a skip that is known late.
        is_fixed = not late and scaler.loss_scale >= scale
        if self._is_recorded:
            found = self._explain(self.recorder.step, scale, late)
        elif torch.compiler.is_dynamo_compiling() or compiler_callback():
            # Within torch.compile what records and explains would be compiled, again and again.
            return None
        else:
            searched = skips.in_a_row > _SEARCHES and (scale <= _LOW_SCALE or skips.has_held)
            is_wrong = is_fixed or searched or (not late and self.recorder.step.loss_is_nonfinite)
            if is_wrong:
                self.recorder.watched_steps = WATCHED_STEPS
            if late or not (is_wrong or skips.has_held):
                return None
            found = self._explain_kept(self.recorder.step, scale)
            if isinstance(found.verdict, NotLocated) and not is_wrong:
                # As a rule a search for the scale.
                return None
        if is_fixed and isinstance(found.verdict, ScaleSearch):
            found = _at_fixed_scale(found, found.verdict, scale)
        if isinstance(found.verdict, NotLocated):
            # Of a step that is known late the losses are gone.
            is_failure = is_fixed or scale == 1.0 or (not late and self.recorder.step.loss_is_nonfinite)
            found = replace(found, verdict=replace(found.verdict, at_any_scale=is_failure))
        # Each cause is logged once.
        is_known = any(one.place == found.place for one in self.all)
        found = replace(found, loss_scale=None if math.isnan(scale) else scale)
        level = logging.INFO if is_known or isinstance(found.verdict, ScaleSearch) else logging.WARNING
        found = self._noted(found, late, level)
        for listener in list(self.listeners):
            listener(found)
        return found

    def step_not_finite(self, late: bool = False) -> Overflow | None:
        """Explain a step that no loss scale guards, before it is taken.

        Args:
            late: Whether it was taken earlier, and others may have been since.
        """
        if self._is_recorded:
            return self._noted(self._explain(self.recorder.step, 1.0, late), late, logging.DEBUG)
        self.recorder.watched_steps = WATCHED_STEPS
        if late or torch.compiler.is_dynamo_compiling() or compiler_callback():
            return None
        return self._noted(self._explain_kept(self.recorder.step, 1.0), late, logging.DEBUG)

    def _noted(self, found: Overflow, late: bool, level: int) -> Overflow:
        if isinstance(found.verdict, NotLocated):
            found = replace(found, verdict=replace(found.verdict, watched=WATCHED_STEPS))
        found = replace(found, iteration=None if late else self._steps - 1)
        if isinstance(found.verdict, NotLocated) or not (self.always or isinstance(found.verdict, ScaleSearch)):
            self.recorder.watched_steps = WATCHED_STEPS
        self.all.append(found)
        log.log(level, "%s", found)
        # The tape of a step whose overflow is known late is gone by then.
        if self.capsules is not None and not late:
            self.capsules.write(found, lambda: self.evidence(self.recorder.step, found.loss_scale or 1.0))
        return found

    # -- finding it --

    def evidence(self, step: RecordedStep, scale: float) -> Evidence:
        """Return what a verdict on a step is found by.

        Args:
            step: The step, which recorded its operators.
            scale: The loss scale of the step.

        Raises:
            CannotRerun: The step was not recorded.
        """
        self.recorder.stop()
        if step.recording is None:
            raise CannotRerun("no call of a model that records gradients was seen in this step")
        tape = step.recording.tape
        with undisturbed():
            named = () if tape.incomplete else named_tensors(step, tape)
        return Evidence(tape, named, scale, self._casts.dtype)

    def _explain(self, step: RecordedStep, scale: float, late: bool = False) -> Overflow:
        if late:
            return unlocated("the device reported the overflow after later steps had begun")
        try:
            with self.observation.quietly(), self._casts.switched(False, forced_off=True):
                found = explain_evidence(self.evidence(step, scale))
        except CannotRerun as error:
            return unlocated(str(error))
        except Exception as error:
            log.debug("the tape of a step could not be looked at", exc_info=True)
            return unlocated(f"running the step again raised {type(error).__name__}: {error}")
        wrapped = any(unwrapped(call.module) is not call.module for call in step.calls)
        if isinstance(found.verdict, NotLocated) and several_processes() and wrapped:
            advice = "trace overflows on all ranks, and look at what the other ranks log"
            return Overflow(Communication(), suggestion=advice)
        return found

    def _explain_kept(self, step: RecordedStep, scale: float) -> Overflow:
        """Explain a step that was not recorded: a call of a model that went wrong in it runs once more."""
        try:
            with self.observation.quietly():
                found = self._look_at_kept(step, scale)
        except CannotRerun as error:
            found = unlocated(str(error))
        except Exception as error:
            log.debug("a call of a model could not run again", exc_info=True)
            found = unlocated(f"running a call of the model again raised {type(error).__name__}: {error}")
        if isinstance(found.verdict, NotLocated) and found.suggestion is None:
            found = replace(found, suggestion=_CATCH)
        return found

    def _look_at_kept(self, step: RecordedStep, scale: float) -> Overflow:
        kept = step.kept
        if kept.incomplete is not None or not kept.calls:
            raise CannotRerun(kept.incomplete or "no call of a model that records gradients was seen in this step")
        if current_graph_task() != -1:
            raise CannotRerun("the optimizer steps within the backward pass")
        if step.loss_is_nonfinite or not (step.losses or all(call.is_finite() for call in kept.calls)):
            for call in kept.calls:
                if not call.is_finite():
                    found = self._explain_outside(map(key_of, call.bad_inputs()), call) or self._run_again(call, 1.0)
                    if found is not None:
                        return found
            return self._explain_outside(step.bad_roots(), kept.calls[-1]) or unlocated(
                "the outputs of the model were finite and the loss was not: code outside of the model made it"
            )
        for call in reversed(kept.calls):
            seeds = call.seeds()
            if nonfinite_value(*seeds):
                return unlocated(
                    "the loss was finite, and the gradients that came to the outputs of "
                    f"{type(unwrapped(call.module)).__name__} were not: the backward pass of the loss made it"
                )
            if any(seed is not None for seed in seeds) and (found := self._run_again(call, scale, seeds)) is not None:
                return found
        raise CannotRerun("run again, the calls of the model gave finite gradients")

    def _explain_outside(self, keys: Iterable[Any], context: KeptCall) -> Overflow | None:
        """Explain inf or nan by the calls of functions outside of models; None if these did not make it.

        Args:
            keys: What they call the tensors that may hold inf or nan.
            context: A call of a model, which casts as they do.
        """
        call = next(filter(None, map(self.recorder.outside.origin_of, keys)), None)
        if call is None:
            return None
        with self.apart(hooked=False), self.recorder.one_step(call.caller) as recorded:
            assert recorded.recording is not None
            tape = recorded.recording.tape
            try:
                with context.as_cast(self._casts):
                    recorded.loss_refs = list(map(tape.find, call.run()))
            finally:
                self.recorder.stop()
                tape.undo()
            found = self._explain(recorded, 1.0)
        return found if found.op is not None else None

    def _run_again(self, call: KeptCall, scale: float, seeds: Sequence[Tensor | None] = ()) -> Overflow | None:
        """Run a call once more under a tape, undo what it writes, and explain it; None if nothing in it went wrong.

        Args:
            call: The call.
            scale: The loss scale.
            seeds: The gradients of its outputs, for a backward pass; none to look at its outputs.
        """
        if why := why_not_again(call.module):
            raise CannotRerun(why)
        if has_written_masters():
            # The call would copy them into the model.
            raise CannotRerun("master weights were written to since the model was called")
        with self.apart() as state, self.recorder.one_step(call.caller) as recorded:
            self.recorder.paused = False
            assert recorded.recording is not None
            tape = recorded.recording.tape
            try:
                outputs = call.run(self._casts)
                if seeds:
                    self._seed(recorded, outputs, seeds)
            finally:
                self.recorder.stop()
                tape.undo()
                state.restore()
            if not seeds:
                return self._explain_outputs(recorded, outputs)
            if not nonfinite_value(*recorded.grads.values()):
                return None
            return self._explain(recorded, scale)

    def _explain_outputs(self, recorded: RecordedStep, outputs: Sequence[Tensor]) -> Overflow | None:
        """Explain inf or nan in the outputs of a call that was recorded; None if it was written on purpose."""
        assert recorded.recording is not None
        recorded.loss_refs = list(map(recorded.recording.tape.find, outputs))
        try:
            half = self.evidence(recorded, 1.0).follow()
        except CannotRerun as error:
            return unlocated(str(error))
        origins = [origin for ref in recorded.loss_refs if (origin := half.origin_of(ref)) is not None]
        # As in masked scores that a model returns.
        return None if all(one.intended for one in origins) else self._explain(recorded, 1.0)

    def _seed(self, recorded: RecordedStep, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Run the backward pass of a call by the gradients of its outputs."""
        pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None]
        roots, given = [output for output, _ in pairs], [seed for _, seed in pairs]
        leaves = reached_by(roots)[0]
        with self.recorder.begin_backward(given):
            grads = torch.autograd.grad(roots, leaves, given, allow_unused=True)
        recorded.grads = dict(zip(leaves, grads, strict=True))

    def explain_loss(self, compute_loss: Callable[[], Any], scale: float) -> Overflow | None:
        """Return the first overflow of a loss and its gradients; see `autoamp.runtime.Handle.explain_overflow`.

        Args:
            compute_loss: Returns the loss.
            scale: The loss scale.
        """
        with self.apart() as state, self.recorder.one_step() as recorded:
            self.recorder.paused = False
            assert recorded.recording is not None
            try:
                with self.recorder.loss_only():
                    loss = compute_loss()
                    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                        self.recorder.refuse_in_loss(
                            f"returned {kind_of(loss)}, not a tensor of one element with a graph"
                        )
                self.recorder.note_loss(loss, scale)
                gradients, why = self._gradients(loss, scale)
            finally:
                self.recorder.stop()
                # What is outside of the step is as it was, so that the tape runs again from there.
                recorded.recording.tape.undo()
                state.restore()
            if nonfinite_value(loss, *gradients):
                return replace(self._explain(recorded, scale), loss_scale=scale)
            return None if why is None else replace(unlocated(why), loss_scale=scale)

    def _gradients(self, loss: Tensor, scale: float) -> tuple[tuple[Tensor | None, ...], str | None]:
        """Return the gradients of a loss, or why there are none: the backward pass of some checkpoints raises."""
        root, leaves = scaled_loss(loss, scale), reached_by([loss])[0]
        try:
            with self.recorder.begin_backward():
                gradients = torch.autograd.grad([root], leaves, retain_graph=True, allow_unused=True)
            self.recorder.step.grads = dict(zip(leaves, gradients, strict=True))
            return gradients, None
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            return (), f"the backward pass raised {type(error).__name__}: {first}"

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
            with self.observation.unobserved(), torch.enable_grad():
                yield state
        finally:
            keeps.close()
            state.restore()
            self._casts.cache.clear()
            self.recorder.paused = paused


def _at_fixed_scale(found: Overflow, verdict: ScaleSearch, scale: float) -> Overflow:
    """Return the finding for a scale that is too large and does not change."""
    if found.op is None:
        return unlocated("gradients of the loss overflow in half precision; its ops were not watched")
    below = f"lower than {scale:g}" if verdict.finite_at is None else f"at most {verdict.finite_at:g}"
    return replace(found, suggestion=f'use loss_scale="dynamic", or a static scale of {below}')
