"""What is kept of each step, so that it can run again if it overflows: references and random states.

A record is of an outermost module call in which gradients are recorded: its arguments, without their graph, and the
random states before it. Of its outputs the sums are kept, to compare with those of the repeated call, and the gradients
that came back to them. A record lives as long as the graph, or until the step once gradients came back. The ops between
the outputs and the loss do not run again; they are watched in some steps (see `OpWatch`).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import operator
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import OpWatch, fp32_sum
from autoamp.errors import UsageError
from autoamp.patching import imitate
from autoamp.tensors import compacted, iter_tensors, map_tensors, version_of
from autoamp.torch_private import compiled_graphs, current_graph_task

__all__ = ["Record", "RecordedStep", "Recorder", "random_states", "set_random_states"]

log = logging.getLogger(__name__)

# Of one step: the bytes of gradients at outputs, and the number of calls and losses.
_MAX_BYTES = 2**28
_MAX_RECORDS = 256


@contextlib.contextmanager
def _no_errors() -> Iterator[None]:
    """Log an error in a ``with`` statement instead of raising it: the program goes on."""
    try:
        yield
    except Exception:
        log.debug("a module call is not recorded", exc_info=True)


def random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of torch on the CPU and the current GPU, of Python and of numpy."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Put the generators back to what `random_states` returned."""
    cpu, gpu, python, of_numpy = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
    random.setstate(python)
    numpy.random.set_state(of_numpy)


@dataclass(eq=False, slots=True)
class Record:
    """One outermost module call.

    Attributes:
        module: The module. The record keeps it alive: a loss module may be made for one call.
        inputs: Its arguments and keyword arguments. A tensor has no graph, and requires gradients if it did.
        versions: The tensors among them, each with the number of writes to it so far.
        random: The random states before the call.
        switches: How the thread cast.
        autocast: The dtype of the `torch.autocast` region that it was in, if any.
        number: The number of the call in its step, from 1.
        outputs: The fp32 sum of each floating output; None for another output.
        gradients: The gradients that came back, one of each backward pass, by the number of the output.
        too_large: Whether gradients came back that are too large to keep.
    """

    module: Module
    inputs: tuple[Any, dict[str, Any]]
    versions: list[tuple[Tensor, int | None]]
    random: tuple[Any, ...]
    switches: Any
    autocast: torch.dtype | None
    number: int
    outputs: list[Tensor | None] = field(default_factory=list)
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    too_large: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether a gradient came back to an output."""
        return self.too_large or bool(self.gradients)

    def written_to(self) -> bool:
        """Tell whether an input was written to since."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


@dataclass(eq=False)
class RecordedStep:
    """What is recorded of a step.

    Attributes:
        records: The module calls, in their order.
        losses: The losses, without their graph. If steps are not recorded, those of one element.
        unscaled: The losses that have one element and no loss scale.
        ops: The ops outside of module calls, if they are watched.
        calls: The number of module calls.
        free: How many more bytes may be kept.
        scaled: The number of losses that were scaled and whose backward pass has not begun.
        is_watched: Whether ops outside of module calls are watched.
        ended: Whether an optimizer was called.
    """

    records: list[Record] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    unscaled: list[Tensor] = field(default_factory=list)
    ops: OpWatch | None = None
    calls: int = 0
    free: float = _MAX_BYTES
    scaled: int = 0
    is_watched: bool = False
    ended: bool = False

    def add(self, record: Record) -> None:
        """Add a record. Gradients come back to the last call first."""
        bisect.insort(self.records, record, key=operator.attrgetter("number"))

    def has_room_for(self, size: int) -> bool:
        """Tell whether so many bytes may be kept, and count them."""
        if size > self.free:
            return False
        self.free -= size
        return True


class _Inside(threading.local):
    # Within a module call, and within the function that `explain_overflow` takes.
    call = False
    loss = False


class Recorder:
    """Keeps records of steps.

    Args:
        casts: How threads cast.
        always: Whether all steps are recorded, and the first one watched. If False, only watched steps are recorded.

    Attributes:
        step: The records of the current step. Those of a skipped step stay until the next module call or loss.
        watched_steps: In so many steps from here on ops outside of module calls are watched.
        paused: Whether nothing is kept, as in a step that runs again.
    """

    def __init__(self, casts: Casts, *, always: bool) -> None:
        self.watched_steps = int(always)
        self.step = RecordedStep(is_watched=always)
        self.paused = False
        self._always = always
        self._casts = casts
        self._inside = _Inside()
        self._graphs = compiled_graphs()

    @property
    def armed(self) -> bool:
        """Whether steps are recorded."""
        return self._always or self.watched_steps > 0

    def end_step(self) -> None:
        """Mark the step as ended, subtract it from `watched_steps` if it was watched, and end the watch of its ops."""
        # Several optimizers may step by the same calls.
        if self.step.is_watched and not self.step.ended:
            self.watched_steps -= 1
        self.step.ended = True
        if self.step.ops is not None:
            self.step.ops.end()

    def drop(self) -> None:
        """Drop what was recorded."""
        self.end_step()
        self.step = RecordedStep(ended=True)

    @contextlib.contextmanager
    def one_step(self) -> Iterator[RecordedStep]:
        """Record what runs in a ``with`` statement, and watch its ops, as a step of its own."""
        if self.step.ops is not None:
            self.step.ops.pause()
        before = self.step, self.watched_steps, self.paused, self._graphs
        self.step, self.watched_steps, self.paused = RecordedStep(free=math.inf, is_watched=True), 1, False
        self._graphs = compiled_graphs()
        self._watch(())
        try:
            yield self.step
        finally:
            self.end_step()
            self.step, self.watched_steps, self.paused, self._graphs = before
            if self.step.ops is not None and not self.step.ended:
                self._watch(())

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
            self.step = RecordedStep(is_watched=self.watched_steps > 0)
        return self.step

    def note_loss(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss that is scaled, and whose backward pass is yet to begin."""
        self._open_step().scaled += 1
        self._note(loss, scale)

    def _note(self, loss: Tensor, scale: SupportsFloat) -> None:
        if self.paused:
            return
        step, value = self._open_step(), loss.detach()
        is_single = loss.numel() == 1
        if (self.armed or is_single) and len(step.losses) < _MAX_RECORDS:
            # An element of the outputs would keep all of them until the next step.
            value = compacted(value) if is_single and type(value) is Tensor else value
            step.losses.append(value)
            if is_single and type(scale) is float and scale == 1.0:
                step.unscaled.append(value)
        if step.ops is not None:
            step.ops.begin_backward(loss, scale)

    def builders(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what to patch: the owner, the attribute, and what builds the replacement of it."""
        return [(torch.autograd, "backward", self._around_backward)]

    def _around_backward(self, original: Any) -> Any:
        """Return a replacement of `torch.autograd.backward` that takes note of losses that nobody scales."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A pass within a pass is a checkpoint's.
            if torch.compiler.is_compiling() or current_graph_task() != -1:
                return original(tensors, *args, **kwargs)
            self.refuse_in_loss("ran a backward pass")
            if self.step.scaled:
                self.step.scaled -= 1
            elif not self.paused:
                for root in iter_tensors(tensors):
                    if root.grad_fn is not None and root.is_floating_point():
                        self._note(root, 1.0)
            return original(tensors, *args, **kwargs)

        return imitate(backward, original, "torch.autograd", "backward")

    # -- calls; see `autoamp.modules.CallRecorder` --

    def wants_call(self) -> bool:
        """Tell whether a call that begins now is recorded."""
        if self.paused or self._inside.call or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        # Within a backward pass a checkpoint computes again what is recorded.
        return current_graph_task() == -1

    def begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        """Begin the record of a module call. It raises nothing."""
        record = None
        with _no_errors():
            record = self._begin(module, args, kwargs)
        self._inside.call = True
        return record

    def _begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        # If a step ended in another thread, its watch still looks at the ops of this one.
        if self.step.ops is not None:
            self.step.ops.pause()
        step = self._open_step()
        on_gpu = torch.cuda.is_initialized()
        if step.calls >= _MAX_RECORDS or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return None
        step.calls += 1
        versions: list[tuple[Tensor, int | None]] = []

        def keep(tensor: Tensor) -> Tensor:
            kept = tensor.detach()
            if tensor.requires_grad and tensor.is_floating_point():
                kept.requires_grad_()
            versions.append((kept, version_of(kept)))
            return kept

        inputs = map_tensors(args, keep), map_tensors(kwargs, keep) if kwargs else kwargs
        kind = self._casts.device_type
        return Record(
            module, inputs, versions, random_states(), self._casts.switches(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None, step.calls,
        )  # fmt: skip

    def end(self, record: Record | None, outputs: Any) -> None:
        """End the record of a module call. It raises nothing."""
        self._inside.call = False
        with _no_errors():
            if record is not None and outputs is not None:
                self._end(record, outputs)

    def _end(self, record: Record, outputs: Any) -> None:
        has_graph = False
        for number, output in enumerate(iter_tensors(outputs)):
            if not output.is_floating_point() or output.layout is not torch.strided:
                record.outputs.append(None)
                continue
            record.outputs.append(fp32_sum(output.detach()))
            if output.grad_fn is not None:
                # From here on the graph holds the record.
                output.grad_fn.register_prehook(functools.partial(self._arrived, record, number, output.output_nr))
                has_graph = True
        self._watch(outputs)
        if not has_graph and self.step.has_room_for(sum(tensor.nbytes for tensor, _ in record.versions)):
            self.step.add(record)

    def _watch(self, outputs: Any) -> None:
        """Watch ops from now on, in the main thread, unless torch.compile has made code."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.step.is_watched and in_main_thread and compiled_graphs() == self._graphs:
            self.step.ops = self.step.ops or OpWatch(self._casts)
            self.step.ops.resume(outputs)

    def _arrived(self, record: Record, output: int, place: int, gradients: Sequence[Any]) -> None:
        """Keep the gradient that came back to an output, in its place among those of its node."""
        with _no_errors():
            step, gradient = self.step, gradients[place]
            # A pass before any loss is scaled, as for a penalty on gradients, is a part of the forward pass.
            if self.paused or step.ended or not step.losses:
                return
            if record not in step.records:
                # What came back in an earlier step is not of this one.
                record.gradients, record.too_large = {}, False
                step.add(record)
            if gradient is None:
                return
            if not step.has_room_for(gradient.nbytes):
                record.too_large = True
                return
            # Under create_graph=True it has a graph of its own.
            gradient = gradient.detach() if gradient.requires_grad else gradient
            record.gradients.setdefault(output, []).append(gradient)
