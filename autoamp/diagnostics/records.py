"""What is kept of each step, so that it can run again if it overflows: references and random states.

A record is of an outermost module call in which gradients are recorded: its arguments, without their graph, and the
random states before it. Of its outputs the sums are kept, to compare with those of the repeated call, and the gradients
that came back to them. A record lives as long as the graph, or until the step once gradients came back. The ops between
the outputs and the loss do not run again; they are watched in some steps (see `autoamp.diagnostics.op_watch`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import fp32_sum
from autoamp.diagnostics.op_watch import OpWatch
from autoamp.patching import imitate
from autoamp.tensors import iter_tensors, map_tensors, version_of
from autoamp.torch_private import compiled_graphs, current_graph_task

__all__ = ["Record", "RecordedStep", "Recorder", "random_states", "set_random_states"]

# Of one step: the bytes of gradients at outputs, and the number of calls and losses.
_MAX_BYTES = 2**28
_MAX_RECORDS = 256


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


@dataclass(eq=False, slots=True, weakref_slot=True)
class Record:
    """One outermost module call.

    Attributes:
        module: The module, by a weak reference.
        inputs: Its arguments and keyword arguments. A tensor has no graph, and requires gradients if it did.
        versions: The tensors among them, each with the number of writes to it so far.
        random: The random states before the call.
        switches: How the thread cast.
        autocast: The dtype of the `torch.autocast` region that it was in, if any.
        number: The number of the call in its step, from 1.
        outputs: The fp32 sum of each floating output; None for another output.
        passes: The gradients that came back, by the number of the loss in the step and by the number of the output.
        too_large: Whether gradients came back that are too large to keep.
    """

    module: weakref.ref[Module]
    inputs: tuple[Any, dict[str, Any]]
    versions: list[tuple[Tensor, int | None]]
    random: tuple[Any, ...]
    switches: Any
    autocast: torch.dtype | None
    number: int
    outputs: list[Tensor | None] = field(default_factory=list)
    passes: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    too_large: bool = False

    def gradients_of(self, loss: int) -> list[Tensor | None]:
        """Return the gradients that came back to the outputs from a loss; None for an output without."""
        return [self.passes[loss].get(number) for number in range(len(self.outputs))]

    def has_gradient(self, output: int) -> bool:
        """Tell whether a gradient came back to an output from any loss."""
        return any(output in given for given in self.passes.values())

    def written_to(self) -> bool:
        """Tell whether an input was written to since."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


@dataclass(eq=False)
class RecordedStep:
    """What is recorded of a step.

    Attributes:
        records: The module calls.
        losses: The losses, without their graph.
        unscaled: The losses that have one element and no loss scale, also if steps are not recorded.
        ops: The ops outside of module calls, if they are watched.
        calls: The number of module calls.
        nbytes: The size of what is kept, in bytes.
        scaled: The number of losses that were scaled and whose backward pass has not begun.
    """

    records: list[Record] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    unscaled: list[Tensor] = field(default_factory=list)
    ops: OpWatch | None = None
    calls: int = 0
    nbytes: int = 0
    scaled: int = 0


class _Inside(threading.local):
    call = False


class Recorder:
    """Keeps records of steps.

    Args:
        casts: How threads cast.
        armed: Whether steps are recorded from the beginning.

    Attributes:
        armed: Whether steps are recorded.
        watches_ops: Whether ops outside of module calls are watched, in the steps that begin now.
        step: What was recorded since the last step.
        paused: Whether nothing is kept, as in a step that runs again.
    """

    def __init__(self, casts: Casts, *, armed: bool) -> None:
        self.armed = self.watches_ops = armed
        self.step = RecordedStep()
        self.paused = False
        self._casts = casts
        self._max_bytes: float = _MAX_BYTES
        self._inside = _Inside()
        self._graphs, self._thread = compiled_graphs(), threading.get_ident()

    def take(self) -> RecordedStep:
        """Return what was recorded of the step, and begin the next."""
        step, self.step, self._thread = self.step, RecordedStep(), threading.get_ident()
        if step.ops is not None:
            step.ops.end()
        step.records.sort(key=operator.attrgetter("number"))
        return step

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Record what runs in a ``with`` statement, and watch its ops, as a step of its own."""
        before = vars(self).copy()
        if self.step.ops is not None:
            self.step.ops.pause()
        self.armed = self.watches_ops = True
        self.step, self._max_bytes = RecordedStep(), math.inf
        self._graphs, self._thread = compiled_graphs(), threading.get_ident()
        self._watch(())
        try:
            yield
        finally:
            self.take()
            vars(self).update(before)

    def note_loss(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss that is scaled, and whose backward pass is yet to begin."""
        self.step.scaled += 1
        self._note(loss, scale, type(scale) is float and scale == 1.0)

    def _note(self, loss: Tensor, scale: SupportsFloat, is_unscaled: bool) -> None:
        if self.paused:
            return
        step = self.step
        if self.armed:
            step.losses.append(loss.detach())
        if is_unscaled and loss.numel() == 1 and len(step.unscaled) < _MAX_RECORDS:
            step.unscaled.append(loss.detach())
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
            if self.step.scaled:
                self.step.scaled -= 1
            elif not self.paused:
                for root in (tensors,) if isinstance(tensors, Tensor) else tensors:
                    if isinstance(root, Tensor) and root.grad_fn is not None and root.is_floating_point():
                        self._note(root, 1.0, is_unscaled=True)
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
        """Begin the record of a module call."""
        if self.step.ops is not None:
            self.step.ops.pause()
        record = self._begin(module, args, kwargs)
        self._inside.call = True
        return record

    def end(self, record: Record | None, outputs: Any) -> None:
        """End the record of a module call."""
        try:
            if record is not None and outputs is not None:
                self._end(record, outputs)
        finally:
            self._inside.call = False

    def _begin(self, module: Module, args: Any, kwargs: Any) -> Record | None:
        on_gpu = torch.cuda.is_initialized()
        if self.step.calls >= _MAX_RECORDS or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return None
        self.step.calls += 1
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
            weakref.ref(module), inputs, versions, random_states(), self._casts.switches(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None, self.step.calls,
        )  # fmt: skip

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
        size = sum(tensor.nbytes for tensor, _ in record.versions)
        if not has_graph and self.step.nbytes + size <= self._max_bytes:
            self.step.nbytes += size
            self.step.records.append(record)

    def _watch(self, outputs: Any) -> None:
        """Watch ops from now on, in the thread that steps, unless torch.compile has made code."""
        if self.watches_ops and threading.get_ident() == self._thread and compiled_graphs() == self._graphs:
            self.step.ops = self.step.ops or OpWatch(self._casts)
            self.step.ops.resume(outputs)

    def _arrived(self, record: Record, output: int, place: int, gradients: Sequence[Any]) -> None:
        """Keep the gradient that came back to an output, in its place among those of its node."""
        # A pass before any loss is scaled, as for a penalty on gradients, is a part of the forward pass.
        step = self.step
        if not step.losses or self.paused:
            return
        if not record.passes:
            step.records.append(record)
        given = record.passes.setdefault(len(step.losses) - 1, {})
        gradient = gradients[place]
        if gradient is None:
            return
        if step.nbytes + gradient.nbytes > self._max_bytes:
            record.too_large = True
        else:
            step.nbytes += gradient.nbytes
            # Under create_graph=True it has a graph of its own.
            given[output] = gradient.detach() if gradient.requires_grad else gradient
