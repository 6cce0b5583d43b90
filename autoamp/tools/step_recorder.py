"""Tapes of steps: which of them are recorded, from the first module call until an optimizer is called.

Nothing of a step that is recorded runs again, and what it overwrote stays as the program left it. Of other steps
nothing is seen: the recorder is a listener only while steps are to be recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import Listener, Listeners, Step, StepHistory
from autoamp.errors import UsageError
from autoamp.tensors import is_capturing, iter_tensors, map_tensors
from autoamp.tools.call_sites import CallPlaces
from autoamp.tools.tape import CannotRerun, Named, Ref, Tape, UnnoticedRecording
from autoamp.torch_private import (
    compiled_graphs,
    compiled_wrappers,
    current_graph_task,
    tracing_state,
    undisturbed,
    without_operator_modes,
)

log = logging.getLogger(__name__)

# So many module calls of one step are on a tape; so many calls of one model if nobody asked for it.
_MAX_CALLS, _UNASKED_CALLS = 256, 2
# A model of these classes is compiled, or gathered from several devices.
_WHOLE = frozenset(("OptimizedModule", "ScriptModule", "FullyShardedDataParallel", "DataParallel"))
# After a skip at most so many steps are recorded, until one is clean.
WATCHED_STEPS = 8


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


@dataclass(eq=False, repr=False)
class RecordedStep:
    """What is recorded of a step.

    Attributes:
        recording: Its tape; None if no call was recorded.
        models: The models that were called, with the arguments, in their order.
        loss_refs: What the tape calls the losses.
        grads: Gradients that are not in the ``.grad`` of their parameters.
        is_recorded: Whether its operators are recorded.
        is_asked: Whether somebody asked for that, who has the memory for it.
        in_closure: Whether an optimizer's closure was evaluated in it.
        ended: Whether an optimizer was called.
    """

    recording: UnnoticedRecording | None = None
    models: list[tuple[Module, Any, Any]] = field(default_factory=list)
    loss_refs: list[Ref | None] = field(default_factory=list)
    grads: dict[Tensor, Tensor | None] = field(default_factory=dict)
    is_recorded: bool = False
    is_asked: bool = False
    in_closure: bool = False
    ended: bool = False

    @property
    def tape(self) -> Tape:
        """Its tape. Raises CannotRerun if the step is not recorded."""
        if self.recording is None:
            raise CannotRerun("no call of a model that records gradients was seen in this step")
        return self.recording.tape

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass is on its tape, of a loss that no closure has computed."""
        ops = () if self.recording is None or self.in_closure else self.recording.tape.ops
        return any(op.phase == "backward" for op in ops)

    def named(self) -> tuple[Named, ...]:
        """Return the tensors on its tape that have names."""
        found = [Named("loss", "loss", "", ref) for ref in self.loss_refs if ref is not None]
        for module, args, kwargs in self.models:
            root = unwrapped(module)
            named: list[tuple[str, str, Tensor | None]] = []
            for name, value in inspect.signature(root.forward).bind(*args, **kwargs).arguments.items():
                for number, one in enumerate(iter_tensors(value)):
                    named.append(("input", name if one is value else f"{name}[{number}]", one))
            named += [("weight", *one) for one in (*root.named_parameters(), *root.named_buffers())]
            named += [("grad", name, self.grads.get(param, param.grad)) for name, param in root.named_parameters()]
            for kind, name, tensor in named:
                # Sparse ones have no memory.
                ref = None if tensor is None or tensor.layout is not torch.strided else self.tape.find(tensor)
                if tensor is not None and ref is not None:
                    has_grad = kind == "input" and tensor.requires_grad
                    found.append(Named(kind, name, type(root).__name__, ref, has_grad))
        return tuple(dict.fromkeys(found))


class _Inside(threading.local):
    # Within a module call, and within the function that `explain_overflow` takes.
    call = False
    loss = False
    # Whose modes this thread has. Another thread may have ended the step meanwhile.
    recording: UnnoticedRecording | None = None


class StepRecorder(Listener):
    """Records steps: all, or those after a skip.

    Args:
        listeners: Those of the handle, of which this is one while steps are recorded.
        always: Whether all steps are recorded.
        no_list_acts: As for `CallPlaces`.

    Attributes:
        step: The step at hand. The tape of a skipped step stays until the next module call or loss.
        paused: Whether nothing is recorded.
        inferences: Looks at calls with gradients off; None for no looks.
    """

    def __init__(self, listeners: Listeners, *, always: bool, no_list_acts: Callable[[], bool] = lambda: False) -> None:
        self.step = RecordedStep(is_recorded=always, is_asked=always)
        self.paused = False
        self.inferences: Any = None
        self._listeners = listeners
        self._always = always
        # So many steps from here on are recorded, until one of this optimizer is clean.
        self._watched = 0
        self._watched_for: weakref.ref[StepHistory] | None = None
        # Of the optimizers whose steps were heard of.
        self._histories: weakref.WeakSet[StepHistory] = weakref.WeakSet()
        self._no_list_acts = no_list_acts
        # Made when the first step is recorded.
        self._places: CallPlaces | None = None
        self._inside = _Inside()
        self._graphs = compiled_graphs()
        if always:
            listeners.add(self)

    def watch(self, history: StepHistory | None) -> None:
        """Record the next steps, until one of this optimizer is clean; at most `WATCHED_STEPS`."""
        self._watched, self._watched_for = WATCHED_STEPS, None if history is None else weakref.ref(history)
        # What came before was not recorded.
        self.step.ended |= not self.step.is_recorded
        self._listeners.add(self)

    # -- steps --

    def step_begun(self) -> bool:
        """End the step at hand: an optimizer is called. The flag of a recorded step is read at once."""
        self.refuse_in_loss("called an optimizer")
        is_recorded = self.step.is_recorded
        self.end_step()
        return is_recorded

    def step_taken(self, history: StepHistory, step: Step) -> None:
        """Forget the step at hand, unless other optimizers may step by the same calls, and be skipped."""
        self._histories.add(history)
        if self._watched_for is not None and self._watched_for() is history:
            self._watched = 0
        if not step.is_late and len(self._histories) == 1:
            self.forget()

    def step_skipped(self, history: StepHistory, step: Step) -> None:
        """Take note of an optimizer. `OverflowTrace` explains the skip."""
        self._histories.add(history)

    def end_step(self) -> None:
        """Mark the step as ended."""
        # Several optimizers may step by the same calls.
        if self.step.is_recorded and not self.step.ended:
            self._watched = max(0, self._watched - 1)
        self.step.ended = True
        self.stop()

    def stop(self, why: str | None = None) -> None:
        """Record no more of the step at hand."""
        if self.step.recording is not None:
            self.step.recording.stop(why)
            if self._inside.recording is self.step.recording:
                self._inside.recording = None
        if self._places is not None:
            self._places.stop()

    def forget(self) -> None:
        """Drop the tape of the step at hand, and what it holds. The step may still run, as one with a closure."""
        self.stop()
        # What the tape calls losses means nothing on another one.
        self.step.recording, self.step.models, self.step.loss_refs = None, [], []

    def closed(self) -> None:
        """Drop what was recorded: torch is about to be restored."""
        self.forget()
        self._leave()
        self.step = RecordedStep(ended=True)

    def _leave(self) -> None:
        """Take the modes back that this thread has still."""
        if self._inside.recording is not None:
            self._inside.recording.pause()
            self._inside.recording = None

    @contextlib.contextmanager
    def one_step(self) -> Iterator[RecordedStep]:
        """Record what runs in a ``with`` statement as a step of its own."""
        outer = self.step.recording
        if outer is not None:
            outer.pause()
        before = self.step, self.paused, self._places
        self.step, self.paused = RecordedStep(is_recorded=True, is_asked=True), False
        self._places = None
        self._listeners.add(self)
        self._record(limit=math.inf, undoes=True)
        try:
            yield self.step
        finally:
            self.stop()
            self.step, self.paused, self._places = before
            if outer is not None and not self.step.ended:
                outer.resume()
                self._inside.recording = outer

    def _record(self, **options: Any) -> None:
        self._leave()
        places = self._places = self._places or CallPlaces(self._no_list_acts)
        places.start()
        self._inside.recording = self.step.recording = UnnoticedRecording(places.here, places, **options)
        places.kept_half = self.step.recording.keep_half
        self.step.recording.resume()

    @contextlib.contextmanager
    def loss_only(self) -> Iterator[None]:
        """Refuse all but the computation of a loss within a ``with`` statement, in this thread."""
        self.refuse_in_loss("called explain_overflow()")
        self._inside.loss = True
        try:
            yield
        finally:
            self._inside.loss = False

    def refuse_in_loss(self, what: str) -> None:
        """Raise UsageError within `loss_only`.

        Args:
            what: What the function did that `explain_overflow` was given.
        """
        if self._inside.loss:
            raise UsageError(
                "explain_overflow() takes a function that returns the loss before its backward pass, as in "
                f"explain_overflow(lambda: loss_fn(model(x), y)), and this one {what}"
            )

    def _open_step(self) -> RecordedStep | None:
        """Return the step at hand: a new one after the last has ended. None if it is not to be recorded."""
        if self.step.ended:
            self.step = RecordedStep(is_recorded=self._always or self._watched > 0, is_asked=self._always)
        if not self.step.is_recorded:
            self._listeners.remove(self)
            return None
        return self.step

    # -- losses and backward passes --

    def loss_scaled(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss."""
        if scale != 1.0:
            self.refuse_in_loss("scaled a loss")
        if not self.paused and (step := self._open_step()) is not None and step.recording is not None:
            step.loss_refs.append(step.recording.tape.find(loss))

    def backward_begun(self, given: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a backward pass runs, by these gradients or by 1."""
        self.refuse_in_loss("ran a backward pass")
        recording = self.step.recording
        if recording is None or self.step.ended or self.paused:
            return contextlib.nullcontext()
        return recording.begin_backward(given)

    # -- calls --

    @contextlib.contextmanager
    def export_begun(self) -> Iterator[None]:
        """Record nothing while a graph of a model is made: modes that see operators spoil it."""
        before, self.paused = self.paused, True
        # `torch.jit.trace` calls itself to check what it made.
        if not before:
            self.stop("the program made a graph of a model in this step")
        try:
            with without_operator_modes():
                yield
        finally:
            self.paused = before

    def call_begun(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Begin the record of a step with its first module call. It raises nothing."""
        if not self._wants_call():
            return None
        ends = None
        try:
            if self.inferences is not None and not torch.is_grad_enabled():
                ends = self.inferences.begin(module, args, kwargs)
            elif self._open_step() is not None:
                self.record_call(module, args, kwargs)
        except CannotRerun as error:
            self.stop(str(error))
        except Exception:
            log.debug("a step is not recorded", exc_info=True)
        self._inside.call = True

        def ended(outputs: Any) -> None:
            self._inside.call = False
            try:
                if ends is not None:
                    ends(outputs)
            except Exception:
                log.debug("a call is not recorded", exc_info=True)

        return ended

    def _wants_call(self) -> bool:
        if self.paused or self._inside.call or torch.compiler.is_compiling():
            return False
        if tracing_state() is not None or is_capturing():
            return False
        if not torch.is_grad_enabled() and (self.inferences is None or compiled_wrappers()):
            return False
        # Within a backward pass a checkpoint computes again what is recorded.
        return current_graph_task() == -1

    def record_call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call of a model in the step at hand, which is recorded."""
        step, why = self.step, None
        if step.recording is None:
            self._record()
        # Without devices `DataParallel` calls what it wraps.
        parts = [part for part in module.modules() if getattr(part, "device_ids", None) != []]
        kinds = {kind.__name__ for part in parts for kind in type(part).__mro__}
        if kinds & _WHOLE or any(getattr(part, "_compiled_call_impl", None) for part in module.modules()):
            why = f"the model is compiled, or parts of it are elsewhere ({type(module).__name__})"
        if compiled_wrappers() > 0 or compiled_graphs() != self._graphs:
            why = "the program uses torch.compile"
        elif len(step.models) >= _MAX_CALLS:
            why = f"the step has more than {_MAX_CALLS} calls of models"
        elif not step.is_asked and sum(one is module for one, _, _ in step.models) >= _UNASKED_CALLS:
            # The memory of a rollout is not for what nobody asked for.
            why = (
                f"the step has more than {_UNASKED_CALLS} calls of one model, which is recorded where that was asked "
                "for: by init(trace_overflow=True), or autoamp run --trace-overflow"
            )
        if why is not None:
            self.stop(why)
            return
        with undisturbed():
            # The graph of an input is not kept alive. The program may change what holds it, or ask for its gradient.
            given = map_tensors((args, kwargs), lambda one: one.detach().requires_grad_(one.requires_grad))
        step.models.append((module, *given))
