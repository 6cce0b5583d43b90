"""What is kept of each step, so that it can be run again if it overflows: references and random states.

A record is of an outermost module call in which gradients are recorded: its arguments, without their graph, and the
random states before it. Of its outputs something is kept by which they are known again, and the gradients that came
back to them. It lives as long as the graph, or until the step once gradients came back. What is computed between the
outputs and the loss is watched in some steps; see `autoamp.diagnostics.op_watch`.
"""

from __future__ import annotations

import functools
import operator
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import sum_of
from autoamp.diagnostics.op_watch import OpWatch, WatchedOps
from autoamp.patching import imitate
from autoamp.tensors import iter_tensors, map_tensors, version_of
from autoamp.torch_private import current_graph_task

__all__ = ["RandomStates", "Record", "RecordedStep", "Recorder"]

# Of a step no more is kept than this: bytes of gradients at outputs, calls.
_MAX_BYTES = 2**28
_MAX_RECORDS = 256
_MAX_BUFFER_ELEMENTS = 2**20
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class RandomStates(NamedTuple):
    """States of the random generators: torch's of the CPU and of the current accelerator, and others where wanted."""

    cpu: Tensor
    device: Tensor | None = None
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, *, all_of_them: bool = False) -> RandomStates:
        """Return the states as they are. Those of Python and numpy take longer than the others."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        others = (random.getstate(), numpy.random.get_state()) if all_of_them else ()
        return cls(torch.get_rng_state(), device, *others)

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        if self.python is not None:
            random.setstate(self.python)
            numpy.random.set_state(self.numpy)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Record:
    """One outermost module call.

    Attributes:
        module: Referred to weakly.
        inputs: Its arguments and keyword arguments, tensors without their graph.
        wanted: The ids of those of its tensors that gradients go back to.
        versions: How often each tensor had been written to.
        random: The random states before it.
        switches: How the thread cast.
        autocast: The dtype of the `torch.autocast` region it was in, if any.
        buffers: Copies of the buffers that it writes to.
        number: Of the call.
        outputs: Of each floating output its fp32 sum; None for another.
        nodes: For each output the number of its node among those of the call, and of the output of that node.
        passes: What came back to each node, by the number of the loss since the last step, and by the node's.
        too_large: Whether gradients came back that are not kept, since they are too large.
    """

    module: weakref.ref[Module]
    inputs: tuple[Any, dict[str, Any]]
    wanted: set[int]
    versions: list[tuple[Tensor, int | None]]
    random: RandomStates
    switches: Any
    autocast: torch.dtype | None
    buffers: dict[str, Tensor | None]
    number: int
    outputs: list[Tensor | None] = field(default_factory=list)
    nodes: list[tuple[int, int] | None] = field(default_factory=list)
    passes: dict[int, dict[int, Sequence[Any]]] = field(default_factory=dict)
    too_large: bool = False

    def gradients_of(self, loss: int) -> list[Tensor | None]:
        """Return the gradients that came back to the outputs in the pass of a loss; None for an output without."""
        given = self.passes[loss]
        return [None if place is None or place[0] not in given else given[place[0]][place[1]] for place in self.nodes]

    def takes_part(self, output: int) -> bool:
        """Tell whether a gradient came back to an output in any pass."""
        return any(self.gradients_of(loss)[output] is not None for loss in self.passes)

    def written_to(self) -> bool:
        """Tell whether an input was written to since."""
        return any(version_of(tensor) != version for tensor, version in self.versions)

    def size(self) -> int:
        """Return the size of its inputs in bytes."""
        return sum(tensor.nbytes for tensor, _ in self.versions)


class RecordedStep(NamedTuple):
    """What was recorded of a step.

    Attributes:
        records: The module calls.
        losses: The losses, without their graph.
        ops: The ops outside of these calls, where they were watched.
    """

    records: Sequence[Record] = ()
    losses: Sequence[Tensor] = ()
    ops: WatchedOps | None = None


_number_of = operator.attrgetter("number")


class _Inside(threading.local):
    call = False


class Recorder:
    """Keeps records of a step.

    Args:
        casts: How threads cast.
        armed: Whether steps are recorded from the beginning.

    Attributes:
        armed: Whether steps are recorded.
        records: The calls since the last step.
        losses: The losses since then, without their graph.
        unscaled: Also where steps are not recorded, those that no scale of autoamp guards, each of one element.
        ops: Watches what is computed between calls and losses.
        paused: Whether nothing is kept, as in a step that is run again.
    """

    def __init__(self, casts: Casts, *, armed: bool) -> None:
        self._casts = casts
        self.armed = armed
        self.records: list[Record] = []
        self.losses: list[Tensor] = []
        self.unscaled: list[Tensor] = []
        self.ops = OpWatch(casts)
        self.paused = False
        self._inside = _Inside()
        # How many calls were recorded since the last step.
        self._calls = 0
        self._bytes = 0
        # How many losses were noted whose backward pass has not begun.
        self._told = 0

    def take(self) -> RecordedStep:
        """Return what there is, and begin anew."""
        records, self.records, self._calls, self._bytes, self._told = self.records, [], 0, 0, 0
        losses, self.losses, self.unscaled = self.losses, [], []
        if len(records) > 1:
            records.sort(key=_number_of)
        return RecordedStep(records, losses, self.ops.take())

    def close(self) -> None:
        """Drop all."""
        self.take()

    def note_loss(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss that is scaled, and whose backward pass is yet to begin."""
        self._told += 1
        self._note(loss, scale, type(scale) is float and scale == 1.0)

    def _note(self, loss: Tensor, scale: SupportsFloat, is_unscaled: bool) -> None:
        if self.paused:
            return
        if self.armed:
            self.losses.append(loss.detach())
        if is_unscaled and loss.numel() == 1 and len(self.unscaled) < _MAX_RECORDS:
            self.unscaled.append(loss.detach())
        self.ops.note_loss(loss, scale)

    def builders(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what to patch: the owner, the attribute, and what builds the replacement of it."""
        return [(torch.autograd, "backward", self._around_backward)]

    def _around_backward(self, original: Any) -> Any:
        """Return a replacement of `torch.autograd.backward` that notes losses which nobody scales."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A pass within a pass is a checkpoint's.
            if torch.compiler.is_compiling() or current_graph_task() != -1:
                return original(tensors, *args, **kwargs)
            if self._told:
                self._told -= 1
            elif not self.paused:
                for root in (tensors,) if isinstance(tensors, Tensor) else tensors:
                    if isinstance(root, Tensor) and root.grad_fn is not None and root.is_floating_point():
                        self._note(root, 1.0, is_unscaled=True)
            return original(tensors, *args, **kwargs)

        return imitate(backward, original, "torch.autograd", "backward")

    def wants_call(self) -> bool:
        """Tell whether a call that begins now is recorded; see `autoamp.modules.CallRecorder`."""
        if self.paused or self._inside.call or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        # Within a backward pass it is a checkpoint that computes again what is recorded.
        return current_graph_task() == -1

    def begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        """Begin the record of a module call; see `autoamp.modules.CallRecorder`."""
        self.ops.pause()
        record = self._begin(module, args, kwargs)
        self._inside.call = True
        return record

    def end(self, record: Record | None, outputs: Any) -> None:
        """End the record of a module call; see `autoamp.modules.CallRecorder`."""
        try:
            if record is not None and outputs is not None:
                self._end(record, outputs)
        finally:
            self._inside.call = False

    def _begin(self, module: Module, args: Any, kwargs: Any) -> Record | None:
        on_gpu = torch.cuda.is_initialized()
        if self._calls >= _MAX_RECORDS or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return None
        self._calls += 1
        wanted: set[int] = set()
        versions: list[tuple[Tensor, int | None]] = []

        def keep(tensor: Tensor) -> Tensor:
            kept = tensor.detach()
            if tensor.requires_grad and tensor.is_floating_point():
                wanted.add(id(kept))
            versions.append((kept, version_of(kept)))
            return kept

        own = []
        for one in args:
            own.append(keep(one) if type(one) is Tensor else map_tensors(one, keep))
        inputs = tuple(own), map_tensors(kwargs, keep) if kwargs else kwargs
        kind = self._casts.device_type
        return Record(
            weakref.ref(module), inputs, wanted, versions, RandomStates.now(all_of_them=self.ops.armed),
            self._casts.switches(), torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            _buffers_of(module), self._calls,
        )  # fmt: skip

    def _end(self, record: Record, outputs: Any) -> None:
        numbers: dict[Any, int] = {}
        for output in (outputs,) if type(outputs) is Tensor else iter_tensors(outputs):
            if not output.is_floating_point() or output.layout is not torch.strided:
                record.outputs.append(None)
                record.nodes.append(None)
                continue
            record.outputs.append(sum_of(output.detach()))
            node = output.grad_fn
            if node is None:
                record.nodes.append(None)
                continue
            number = numbers.get(node)
            if number is None:
                number = numbers[node] = len(numbers)
                # From here on the graph holds the record.
                node.register_prehook(functools.partial(self._arrived, record, number))
            record.nodes.append((number, output.output_nr))
        self.ops.begin()
        if not numbers and self._bytes + (size := record.size()) <= _MAX_BYTES:
            self._bytes += size
            self.records.append(record)

    def _arrived(self, record: Record, number: int, gradients: Sequence[Any]) -> None:
        """Keep what came back to a node of a record."""
        # A pass before any loss is scaled, as for a penalty on gradients, is a part of the forward pass.
        if not self.losses or self.paused:
            return
        if not record.passes:
            self.records.append(record)
        given = record.passes.setdefault(len(self.losses) - 1, {})
        kept: list[Tensor | None] = []
        size = self._bytes
        for gradient in gradients:
            # Under create_graph=True it has a graph of its own.
            kept.append(gradient.detach() if gradient is not None and gradient.requires_grad else gradient)
            size += 0 if gradient is None else gradient.nbytes
        if size > _MAX_BYTES:
            record.too_large = True
        else:
            self._bytes, given[number] = size, kept


def _buffers_of(module: Module) -> dict[str, Tensor | None]:
    """Return copies of the buffers that a call may write to and go by; none where they are large."""
    if sum(buffer.numel() for buffer in module.buffers()) > _MAX_BUFFER_ELEMENTS:
        return {}
    # What a batch norm computes in training does not depend on its running averages.
    return {
        f"{path}.{name}".removeprefix("."): None if buffer is None else buffer.detach().clone()
        for path, owner in module.named_modules()
        if not (isinstance(owner, _BATCH_NORMS) and owner.training)
        for name, buffer in vars(owner)["_buffers"].items()
    }
