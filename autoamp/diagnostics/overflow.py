"""Why a step was skipped: each skip explained, by the tape of the step, which runs again by itself.

`OverflowTrace` explains a skip at once, before the program goes on. In a step that was not recorded the call of a model
that went wrong may run once more; what it writes is undone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoamp.auto_scaling import reached_by
from autoamp.casting import CastState
from autoamp.diagnostics.call_sites import Caller
from autoamp.diagnostics.capsule import CapsuleWriter
from autoamp.diagnostics.findings import by_communication, explain_tape, unlocated
from autoamp.diagnostics.inferences import Inferences
from autoamp.diagnostics.kept_calls import KeptCall, OutsideCall, floating, key_of, unwrapped
from autoamp.diagnostics.observer import Observation
from autoamp.diagnostics.origins import Followed, nonfinite_value
from autoamp.diagnostics.second_calls import KeptState
from autoamp.diagnostics.step_recorder import WATCHED_STEPS, RecordedStep, StepRecorder
from autoamp.diagnostics.tables import counted
from autoamp.diagnostics.verdicts import NotLocated, Overflow, ScaleSearch
from autoamp.errors import kind_of
from autoamp.program import Subscriber, listen
from autoamp.scaling import LossScaler, scaled_loss
from autoamp.stepping import Skips, Step, several_processes
from autoamp.tape import CannotRerun, Tape
from autoamp.torch_private import compiler_callback, current_graph_task, undisturbed, without_operator_modes

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_CATCH = "trace_overflow=True (autoamp run --trace-overflow) records every step, and names the op that made it"

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
            explain = functools.partial(self._found, self._look_at_outputs, scale=1.0)
            self.recorder.inferences = Inferences(self.recorder, explain)
        self.listeners: list[Callable[[Overflow], object]] = []
        self.capsules: CapsuleWriter | None = None
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

    def close(self) -> None:
        """Drop what was recorded: the handle is no longer active."""
        self.recorder.drop()

    def around_export(self, original: Any) -> Any:
        """Return a function that makes a graph of a model without the modes that see operators: they spoil traces."""
        recorder = self.recorder

        def export(*args: Any, **kwargs: Any) -> Any:
            # `torch.jit.trace` calls itself to check what it made.
            if recorder.paused:
                return original(*args, **kwargs)
            recorder.outside.pause()
            recorder.stop("the program made a graph of a model in this step")
            recorder.paused = True
            try:
                with without_operator_modes():
                    return original(*args, **kwargs)
            finally:
                recorder.paused = False

        return export

    # -- what steps tell --

    def step_known(self, skips: Skips, step: Step) -> Overflow | None:
        """Called once it is known what became of a step; explains a skip."""
        self._skips.add(skips)
        scaler, scale, late, recorded = step.skipped_by, step.scale, step.is_late, self.recorder.step
        if not isinstance(scaler, LossScaler):
            # Another optimizer may step by the same calls, and be skipped.
            if not late and len(self._skips) == 1:
                self.recorder.forget()
            return None
        if not recorded.is_recorded and _within_compiler():
            return None
        # The next scale is not that of a skip that is known late, and its losses are gone.
        is_fixed = not late and scaler.loss_scale >= scale
        is_failure = is_fixed or scale == 1.0 or (not late and recorded.loss_is_nonfinite)
        is_wrong = is_failure or (skips.in_a_row > _SEARCHES and (scale <= _LOW_SCALE or skips.has_held))
        if not recorded.is_recorded:
            if is_wrong:
                self.recorder.watched_steps = WATCHED_STEPS
            if late or not (is_wrong or skips.has_held):
                return None
        found = self._explain_step(recorded, scale, late)
        if isinstance(found.verdict, NotLocated) and not (recorded.is_recorded or is_wrong):
            # As a rule a search for the scale.
            return None
        if is_fixed and isinstance(found.verdict, ScaleSearch):
            finite_at = found.verdict.finite_at
            below = f"lower than {scale:g}" if finite_at is None else f"at most {finite_at:g}"
            found = replace(found, suggestion=f'use loss_scale="dynamic", or a static scale of {below}')
            if found.op is None:
                found = unlocated("gradients of the loss overflow in half precision; its ops were not watched")
        # Each cause is logged once.
        is_known = any(one.place == found.place for one in self.all)
        level = logging.INFO if is_known or isinstance(found.verdict, ScaleSearch) else logging.WARNING
        found = replace(found, loss_scale=None if math.isnan(scale) else scale)
        found = self._noted(found, late, level, at_any_scale=is_failure)
        for listener in list(self.listeners):
            listener(found)
        return found

    def step_not_finite(self, late: bool = False) -> Overflow | None:
        """Explain a step that no loss scale guards, before it is taken.

        Args:
            late: Whether it was taken earlier, and others may have been since.
        """
        if not self.recorder.step.is_recorded:
            self.recorder.watched_steps = WATCHED_STEPS
            if late or _within_compiler():
                return None
        return self._noted(self._explain_step(self.recorder.step, 1.0, late), late, logging.DEBUG)

    def _noted(self, found: Overflow, late: bool, level: int, *, at_any_scale: bool = False) -> Overflow:
        found = replace(found, iteration=None if late else self.recorder.steps - 1)
        if isinstance(found.verdict, NotLocated):
            verdict = replace(found.verdict, watched=WATCHED_STEPS, at_any_scale=at_any_scale)
            found = replace(found, verdict=verdict)
        if isinstance(found.verdict, NotLocated) or not (self.always or isinstance(found.verdict, ScaleSearch)):
            self.recorder.watched_steps = WATCHED_STEPS
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
        tape.scale, tape.half_dtype = scale, self._casts.dtype
        with undisturbed():
            tape.named = () if tape.incomplete else step.named()
        return tape

    def _explain_step(self, step: RecordedStep, scale: float, late: bool) -> Overflow:
        """Explain a step by its tape. If it was not recorded, the call that went wrong in it runs once more."""
        if late:
            return unlocated("the device reported the overflow after later steps had begun")
        if step.is_recorded:
            return self._found(self._look_at_tape, step, scale)
        found = self._found(self._look_at_kept, step, scale)
        if isinstance(found.verdict, NotLocated) and found.suggestion is None:
            found = replace(found, suggestion=_CATCH)
        return found

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

    def _look_at_kept(self, step: RecordedStep, scale: float) -> Overflow:
        if step.incomplete is not None or not step.calls:
            raise CannotRerun(step.incomplete or "no call of a model that records gradients was seen in this step")
        if current_graph_task() != -1:
            raise CannotRerun("the optimizer steps within the backward pass")
        if step.loss_is_nonfinite or not (step.losses or all(call.is_finite() for call in step.calls)):
            for call in step.calls:
                if not call.is_finite():
                    bad = [key_of(tensor) for tensor in floating(call.inputs()) if nonfinite_value(tensor)]
                    found = self._explain_outside(bad) or self._run_again(call)
                    if found is not None:
                        return found
            bad = [root for loss, root in zip(step.losses, step.roots, strict=True) if nonfinite_value(loss)]
            return self._explain_outside(bad) or unlocated(
                "the outputs of the model were finite and the loss was not: code outside of the model made it"
            )
        for call in reversed(step.calls):
            seeds = call.seeds()
            if nonfinite_value(*seeds):
                return unlocated(
                    "the loss was finite, and the gradients that came to the outputs of "
                    f"{type(unwrapped(call.module)).__name__} were not: the backward pass of the loss made it"
                )
            if any(seed is not None for seed in seeds) and (found := self._run_again(call, scale, seeds)) is not None:
                return found
        raise CannotRerun("run again, the calls of the model gave finite gradients")

    def _explain_outside(self, keys: Iterable[Any]) -> Overflow | None:
        """Explain inf or nan by the calls of functions outside of models; None if these did not make it.

        Args:
            keys: What they call the tensors that may hold inf or nan.
        """
        call = next(filter(None, map(self.recorder.outside.origin_of, keys)), None)
        found = None if call is None else self._run_again(call)
        return None if found is None or found.op is None else found

    def _run_again(
        self, call: KeptCall | OutsideCall, scale: float = 1.0, seeds: Sequence[Tensor | None] = ()
    ) -> Overflow | None:
        """Run a call once more under a tape, undo what it writes, and explain it; None if nothing in it went wrong.

        Args:
            call: The call.
            scale: The loss scale.
            seeds: The gradients of its outputs, for a backward pass; none to look at its outputs.
        """
        with self._recorded(call.caller) as (step, end):
            outputs = call.run()
            if seeds:
                pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None]
                self._run_backward(step, [output for output, _ in pairs], [seed for _, seed in pairs])
            end()
            if seeds:
                return self._look_at_tape(step, scale) if nonfinite_value(*step.grads.values()) else None
            step.loss_refs = list(map(step.tape.find, outputs))
            look = self._look_at_outputs if isinstance(call, KeptCall) else self._look_at_tape
            return look(step, 1.0)

    def _look_at_outputs(self, step: RecordedStep, scale: float) -> Overflow | None:
        """Explain inf or nan in the outputs of a call, which are its losses; None if it was written on purpose."""
        half = Followed(self.tape_of(step, scale))
        origins = [origin for ref in step.loss_refs if (origin := half.origin_of(ref)) is not None]
        # As in masked scores that a model returns.
        return None if all(one.intended for one in origins) else self._look_at_tape(step, scale)

    def explain_loss(self, compute_loss: Callable[[], Any], scale: float) -> Overflow | None:
        """Return the first overflow of a loss and its gradients; see `autoamp.runtime.Handle.explain_overflow`.

        Args:
            compute_loss: Returns the loss.
            scale: The loss scale.
        """
        why = None
        with self._recorded() as (step, end):
            with self.recorder.loss_only():
                loss = compute_loss()
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    self.recorder.refuse_in_loss(f"returned {kind_of(loss)}, not a tensor of one element with a graph")
            self.recorder.backward_begins(loss, scale)
            try:
                self._run_backward(step, [scaled_loss(loss, scale)])
            except RuntimeError as error:
                # As that of some checkpoints.
                first = str(error).partition("\n")[0]
                why = f"the backward pass raised {type(error).__name__}: {first}"
            end()
            if nonfinite_value(loss, *step.grads.values()):
                return replace(self._found(self._look_at_tape, step, scale), loss_scale=scale)
        return None if why is None else replace(unlocated(why), loss_scale=scale)

    def _run_backward(self, step: RecordedStep, roots: list[Tensor], given: list[Tensor] | None = None) -> None:
        """Run a backward pass, by given gradients or by 1, and keep the gradients in the step."""
        leaves = reached_by(roots)[0]
        with self.recorder.begin_backward(given):
            grads = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
        step.grads = dict(zip(leaves, grads, strict=True))

    @contextlib.contextmanager
    def _recorded(self, caller: Caller | None = None) -> Iterator[tuple[RecordedStep, Callable[[], None]]]:
        """Record what runs in a ``with`` statement as a step of its own, and put back what it writes.

        Args:
            caller: As for `StepRecorder.one_step`.

        Yields:
            The step, and what ends it: with everything as it was before, the tape runs again from there.
        """
        with self.apart() as state, self.recorder.one_step(caller) as step:

            def end() -> None:
                self.recorder.stop()
                step.tape.undo()
                state.restore()

            try:
                yield step, end
            finally:
                end()

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
