"""Tapes of steps: which of them are recorded, from the first module call until an optimizer is called.

Nothing of a step that is recorded runs again, and what it overwrote stays as the program left it. Of other steps the
calls are kept (`kept_calls.py`): if one goes wrong, the call that did may run once more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import CastState
from autoamp.diagnostics.call_sites import Caller, CallPlaces, user_frame
from autoamp.diagnostics.kept_calls import KeptCall, KeptTensor, OutsideCalls, floating, key_of, unwrapped
from autoamp.errors import UsageError
from autoamp.program import Subscriber
from autoamp.scaling import local_of
from autoamp.stepping import several_processes
from autoamp.tape import CannotRerun, Named, Ref, Tape, UnnoticedRecording
from autoamp.tensors import compacted, iter_tensors, map_tensors
from autoamp.torch_private import (
    compiled_graphs,
    compiled_wrappers,
    current_graph_task,
    is_transformed,
    tracing_state,
    undisturbed,
)

log = logging.getLogger(__name__)

# So many module calls and losses of one step are on a tape, and so many are kept without one.
_MAX_CALLS, _MAX_KEPT_CALLS = 256, 16
# So many bytes are kept that the program itself may not keep.
_MAX_BYTES = 2**26
_TYPES = (Tensor, torch.nn.Parameter)
# A model of these classes is compiled, or gathered from several devices.
_WHOLE = frozenset(("OptimizedModule", "ScriptModule", "FullyShardedDataParallel", "DataParallel"))
# After inf or nan so many steps are recorded, and so many calls with gradients off, until one gives it again.
WATCHED_STEPS = 8


@dataclass(eq=False, repr=False)
class RecordedStep:
    """What is recorded of a step.

    Attributes:
        recording: Its tape; None if the step is not recorded.
        models: The models that were called if it is recorded, with the arguments, in their order.
        calls: Their calls if it is not.
        incomplete: Why calls are missing; None if none are.
        losses: The losses, without their graph. If steps are not recorded, those of one element.
        loss_refs: What the tape calls the losses.
        roots: What the calls outside of models call the losses.
        grads: Gradients that are not in the ``.grad`` of their parameters.
        unscaled: The losses that have one element and no loss scale.
        scaled: The number of losses that were scaled and whose backward pass has not begun.
        is_recorded: Whether its operators are recorded.
        is_watched: Whether the flag of the step is read at once.
        ended: Whether an optimizer was called.
    """

    recording: UnnoticedRecording | None = None
    models: list[tuple[Module, Any, Any]] = field(default_factory=list)
    calls: list[KeptCall] = field(default_factory=list)
    incomplete: str | None = None
    losses: list[Tensor] = field(default_factory=list)
    loss_refs: list[Ref | None] = field(default_factory=list)
    roots: list[Any] = field(default_factory=list)
    grads: dict[Tensor, Tensor | None] = field(default_factory=dict)
    unscaled: list[Tensor] = field(default_factory=list)
    scaled: int = 0
    is_recorded: bool = False
    is_watched: bool = False
    ended: bool = False
    _nbytes: int = 0

    @property
    def tape(self) -> Tape:
        """Its tape. Raises CannotRerun if the step is not recorded."""
        if self.recording is None:
            raise CannotRerun("no call of a model that records gradients was seen in this step")
        return self.recording.tape

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

    @property
    def loss_is_nonfinite(self) -> bool:
        """Whether a loss itself held inf or nan. Waits for the device."""
        with undisturbed():
            return any(not bool(local_of(loss).isfinite().all()) for loss in self.losses)

    # -- if the step is not recorded --

    def keep(self, tensor: Tensor) -> KeptTensor:
        """Keep a tensor. Raises CannotRerun if it is of no use."""
        if type(tensor) not in _TYPES or tensor.layout is not torch.strided or is_transformed(tensor):
            raise CannotRerun(f"a tensor is a {type(tensor).__name__} of layout {tensor.layout}")
        # The memory of a device is not for this.
        is_strong = tensor.device.type == "cpu" and self._nbytes + tensor.nbytes <= _MAX_BYTES
        self._nbytes += tensor.nbytes if is_strong else 0
        return KeptTensor(tensor, is_strong=is_strong)

    def keep_outputs(self, call: KeptCall, outputs: Any) -> None:
        """Keep the outputs of a call, and their gradients when these come."""
        for place, tensor in enumerate(floating(outputs)):
            call.outputs.append(self.keep(tensor))
            if tensor.grad_fn is not None:
                hook = functools.partial(self._keep_grad, call.grads, place)
                # As for torch's own hooks: a tensor is pickled without it, and without a warning.
                vars(hook)["__torch_unserializable__"] = True
                tensor.register_hook(hook)

    def _keep_grad(self, grads: dict[int, KeptTensor | None], place: int, grad: Tensor) -> None:
        """Keep the gradient of an output. A hook, which changes nothing."""
        try:
            if self.incomplete is None:
                grads[place] = None if place in grads else self.keep(grad)
        except CannotRerun as error:
            self.incomplete = str(error)


class _Inside(threading.local):
    # Within a module call, and within the function that `explain_overflow` takes.
    call = False
    loss = False
    # Whose modes this thread has. Another thread may have ended the step meanwhile.
    recording: UnnoticedRecording | None = None


class StepRecorder(Subscriber):
    """Records steps.

    Args:
        always: Whether all steps are recorded. If False, only watched steps are, and calls of the others are kept.
        casts: How threads cast.

    Attributes:
        step: The current step. The tape of a skipped step stays until the next module call or loss.
        steps: The number of calls of optimizers.
        watched_steps: So many steps from here on are recorded.
        paused: Whether nothing is recorded.
        inferences: Looks at calls with gradients off; None for no looks.
        outside: Keeps the calls of functions between the calls of models that are kept.
    """

    def __init__(self, casts: CastState, *, always: bool) -> None:
        self._casts = casts
        self.steps = 0
        self.watched_steps = int(always)
        self.step = RecordedStep(is_recorded=always, is_watched=always)
        self.paused = False
        self._always = always
        self._places = CallPlaces()
        self._inside = _Inside()
        self._graphs = compiled_graphs()
        self.outside = OutsideCalls()
        self.inferences: Any = None

    def step_begins(self) -> None:
        """An optimizer is called, which ends the recorded step."""
        self.refuse_in_loss("called an optimizer")
        self.steps += 1
        self.end_step()

    def wants_flags(self) -> bool:
        """Whether the flag of this step is to be read at once, because its ops are watched."""
        return self.step.is_watched

    def end_step(self) -> None:
        """Mark the step as ended, and subtract it from `watched_steps` if it was watched."""
        # Several optimizers may step by the same calls.
        if self.step.is_watched and not self.step.ended:
            self.watched_steps -= 1
        self.step.ended = True
        self.outside.pause()
        self.stop()

    def stop(self, why: str | None = None) -> None:
        """Record no more of the step at hand."""
        if self.step.recording is not None:
            self.step.recording.stop(why)
            if self._inside.recording is self.step.recording:
                self._inside.recording = None
        self._places.stop()

    def forget(self) -> None:
        """Drop the tape of the step at hand, and what it holds. The step may still run, as one with a closure."""
        self.stop()
        step = self.step
        step.recording, step.models, step.calls, step.incomplete = None, [], [], "the step was dropped"
        self.outside.drop()

    def drop(self) -> None:
        """Drop what was recorded."""
        self.end_step()
        self.forget()
        self._leave()
        self.step = RecordedStep(ended=True)

    def _leave(self) -> None:
        """Take the modes back that this thread has still."""
        if self._inside.recording is not None:
            self._inside.recording.pause()
            self._inside.recording = None

    @contextlib.contextmanager
    def one_step(self, caller: Caller | None = None) -> Iterator[RecordedStep]:
        """Record what runs in a ``with`` statement as a step of its own.

        Args:
            caller: What is said to call what the ``with`` statement calls; by default the frames tell.
        """
        outer = self.step.recording
        if outer is not None:
            outer.pause()
        before = self.step, self.watched_steps, self.paused, self._places
        self.step, self.watched_steps, self.paused = RecordedStep(is_recorded=True, is_watched=True), 1, False
        self._places = CallPlaces(caller)
        self._record(limit=math.inf, undoes=True)
        try:
            yield self.step
        finally:
            self.end_step()
            self.step, self.watched_steps, self.paused, self._places = before
            if outer is not None and not self.step.ended:
                outer.resume()
                self._inside.recording = outer

    def _record(self, **options: Any) -> None:
        self._leave()
        self._places.start()
        self._inside.recording = self.step.recording = UnnoticedRecording(self._places.here, self._places, **options)
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

    def _open_step(self) -> RecordedStep:
        """Return the step at hand: a new one after the last has ended."""
        if self.step.ended:
            self.forget()
            is_watched = self.watched_steps > 0
            self.step = RecordedStep(is_recorded=self._always or is_watched, is_watched=is_watched)
        return self.step

    # -- losses and backward passes --

    def backward_begins(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss that is scaled, and whose backward pass is yet to begin."""
        self.refuse_in_loss("scaled a loss")
        self._open_step().scaled += 1
        self._note(loss, scale)

    def _note(self, loss: Tensor, scale: SupportsFloat) -> None:
        if self.paused:
            return
        step, is_single = self._open_step(), loss.numel() == 1
        if not (step.is_recorded or is_single) or len(step.losses) >= _MAX_CALLS:
            return
        with undisturbed():
            value = loss.detach()
            # An element of the outputs would keep all of them until the next step.
            value = compacted(value) if is_single and type(value) is Tensor else value
        step.losses.append(value)
        step.roots.append(key_of(loss))
        if step.recording is not None:
            step.loss_refs.append(step.recording.tape.find(loss))
        if is_single and type(scale) is float and scale == 1.0:
            step.unscaled.append(value)

    def around_backward(self, original: Any) -> Any:
        """Return a replacement of `torch.autograd.backward` that takes note of losses and of where passes begin."""

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # A pass within a pass is a checkpoint's.
            if torch.compiler.is_compiling() or current_graph_task() != -1:
                return original(tensors, grad_tensors, *args, **kwargs)
            self.refuse_in_loss("ran a backward pass")
            if self.step.scaled:
                self.step.scaled -= 1
            elif not self.paused:
                for root in iter_tensors(tensors):
                    if root.grad_fn is not None and root.is_floating_point():
                        self._note(root, 1.0)
            with self.begin_backward((grad_tensors, kwargs.get("grad_variables"))):
                return original(tensors, grad_tensors, *args, **kwargs)

        return backward

    def begin_backward(self, given: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a backward pass runs, by these gradients or by 1."""
        self.outside.pause()
        recording = self.step.recording
        if recording is None or self.step.ended or self.paused:
            return contextlib.nullcontext()
        return recording.begin_backward(given)

    # -- calls; see `autoamp.modules.CallRecorder` --

    def wants_call(self) -> bool:
        """Whether a call that begins now is recorded."""
        if self.paused or self._inside.call or torch.compiler.is_compiling():
            return False
        if not torch.is_grad_enabled() and (self.inferences is None or compiled_wrappers() or _is_captured()):
            return False
        # Within a backward pass a checkpoint computes again what is recorded.
        return current_graph_task() == -1

    def begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the record of a step with its first module call, or keep the call. It raises nothing."""
        kept: Any = None
        self.outside.pause()
        try:
            if self.inferences is not None and not torch.is_grad_enabled():
                kept = self.inferences.begin(module, args, kwargs)
            elif self._open_step().is_recorded:
                self.record_call(module, args, kwargs)
            else:
                kept = self._keep(module, args, kwargs)
        except CannotRerun as error:
            self.step.incomplete = str(error)
        except Exception:
            log.debug("a step is not recorded", exc_info=True)
        self._inside.call = True
        return kept

    def _keep(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptCall | None:
        step = self._open_step()
        if self._is_compiled():
            raise CannotRerun("the program uses torch.compile")
        if several_processes():
            raise CannotRerun("a call of a model of several processes does not run again")
        if _is_captured():
            raise CannotRerun("the call is traced, or captured in a CUDA graph")
        if step.incomplete is None and len(step.calls) == _MAX_KEPT_CALLS:
            raise CannotRerun(f"the step has more than {_MAX_KEPT_CALLS} calls of models")
        if step.incomplete is not None:
            return None
        args, kwargs = map_tensors((args, kwargs), step.keep)
        step.calls.append(KeptCall(module, args, kwargs, self._casts, Caller.of(user_frame(sys._getframe(2)))))
        return step.calls[-1]

    def _is_compiled(self) -> bool:
        return compiled_wrappers() > 0 or compiled_graphs() != self._graphs

    def record_call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call of a model in the step at hand, which is recorded."""
        step, why = self._open_step(), None
        if step.recording is None:
            self._record()
        kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
        if kinds & _WHOLE or any(getattr(part, "_compiled_call_impl", None) for part in module.modules()):
            why = f"the model is compiled, or parts of it are elsewhere ({type(module).__name__})"
        if self._is_compiled():
            why = "the program uses torch.compile"
        elif len(step.models) >= _MAX_CALLS:
            why = f"the step has more than {_MAX_CALLS} calls of models"
        if why is not None:
            self.stop(why)
            return
        with undisturbed():
            # The graph of an input is not kept alive. The program may change what holds it, or ask for its gradient.
            given = map_tensors((args, kwargs), lambda one: one.detach().requires_grad_(one.requires_grad))
        step.models.append((module, *given))

    def end(self, record: Any, outputs: Any) -> None:
        """Called when the call has ended."""
        self._inside.call = False
        try:
            if isinstance(record, KeptCall):
                self.step.keep_outputs(record, outputs)
                # The handle may have been deactivated within the call.
                if not self.step.ended:
                    self.outside.resume(record)
            elif record is not None and self.inferences is not None:
                self.inferences.end(record, outputs)
        except CannotRerun as error:
            self.step.incomplete = str(error)
        except Exception:
            log.debug("a call is not kept", exc_info=True)


def _is_captured() -> bool:
    """Whether calls are traced, or captured in a CUDA graph."""
    return tracing_state() is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
