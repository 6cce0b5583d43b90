"""What is kept of each step, so that it can be run again if it overflows: references, random states, fp32 sums.

A record is of an outermost module call in which gradients are recorded: its arguments, without their graph, and the
random states before it. Of its outputs one fp32 sum each is kept, and the gradients that came back to them. Of what is
computed between the outputs and the loss, each node of the graph leaves what went through it.
"""

from __future__ import annotations

import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import user_line
from autoamp.patching import imitate, original_of
from autoamp.tensors import iter_tensors, map_tensors, version_of

__all__ = ["LossRegion", "NodeTrace", "RandomStates", "Record", "Recorder"]

_KEY = "autoamp.diagnostics"
# Of a step no more is kept than this: bytes of gradients at outputs, calls, nodes between outputs and loss.
_MAX_BYTES = 2**28
_MAX_RECORDS = 256
_MAX_NODES = 64
_MAX_BUFFER_ELEMENTS = 2**20


@dataclass(frozen=True)
class RandomStates:
    """States of the random generators: torch's of the CPU and of the current accelerator, and others where wanted."""

    cpu: Tensor
    device: Tensor | None
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, *, all_of_them: bool = False) -> RandomStates:
        """Return the states as they are. Those of Python and numpy take longer than the others."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        if not all_of_them:
            return cls(torch.get_rng_state(), device)
        return cls(torch.get_rng_state(), device, random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        if self.python is not None:
            random.setstate(self.python)
            numpy.random.set_state(self.numpy)


@dataclass(eq=False)
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
        sums: The fp32 sum of each floating output, None for another.
        nodes: For each output the number of its node among those of the call, and of the output of that node.
        gradients: What came back to each node: None before its turn.
        unfit: Why it cannot be run again; None where it can.
    """

    module: weakref.ref[Module]
    inputs: tuple[Any, dict[str, Any]]
    wanted: frozenset[int]
    versions: list[tuple[Tensor, int | None]]
    random: RandomStates
    switches: Any
    autocast: torch.dtype | None
    buffers: dict[str, Tensor]
    sums: list[Tensor | None] = field(default_factory=list)
    nodes: list[tuple[int, int] | None] = field(default_factory=list)
    gradients: dict[int, Sequence[Any]] = field(default_factory=dict)
    unfit: str | None = None
    too_large: bool = False

    def gradient_of(self, output: int) -> Tensor | None:
        """Return the gradient that came back to an output."""
        place = self.nodes[output]
        if place is None or place[0] not in self.gradients:
            return None
        return self.gradients[place[0]][place[1]]  # type: ignore[no-any-return]

    def written_to(self) -> bool:
        """Tell whether an input was written to since."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


@dataclass(eq=False)
class NodeTrace:
    """What went through one node between outputs and loss: gradients, or the fp32 sums of large ones."""

    name: str
    line: str | None
    got: Sequence[Any] = ()
    gave: Sequence[Any] = ()
    dtypes: Sequence[torch.dtype | None] = ()


@dataclass(eq=False)
class LossRegion:
    """What is computed between the outputs of modules and one loss.

    Attributes:
        loss: The loss, without its graph.
        line: The line of the program at which it was scaled.
        traces: Of its nodes, in the order in which they ran.
        whole: Whether all of its nodes are among them.
    """

    loss: Tensor
    line: str | None
    traces: list[NodeTrace] = field(default_factory=list)
    whole: bool = True


class _Inside(threading.local):
    call = False


class Recorder:
    """Keeps records of a step.

    Args:
        casts: How threads cast.

    Attributes:
        records: The calls since the last step.
        losses: The losses since then.
        thorough: Whether more is kept: random states of Python and numpy, the lines of what is computed of outputs.
        paused: Whether nothing is kept, as in a step that is run again.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self.records: list[Record] = []
        self.losses: list[LossRegion] = []
        self.thorough = False
        self.paused = False
        self._inside = _Inside()
        self._bytes = 0
        self._buffers: weakref.WeakKeyDictionary[Module, list[str]] = weakref.WeakKeyDictionary()
        self._anomaly: tuple[bool, bool] | None = None

    def take(self) -> tuple[list[Record], list[LossRegion]]:
        """Return what there is, and begin anew."""
        self._mark_lines(False)
        taken = self.records, self.losses
        self.records, self.losses, self._bytes = [], [], 0
        return taken

    def around(self, call: Any) -> Any:
        """Return a replacement of ``Module.__call__`` that keeps a record of outermost calls."""
        inside, compiling = self._inside, torch.compiler.is_compiling

        def recorded(module: Module, *args: Any, **kwargs: Any) -> Any:
            if compiling() or inside.call or self.paused or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            inside.call = True
            try:
                record = self._begin(module, args, kwargs)
                outputs = call(module, *args, **kwargs)
                self._end(record, outputs)
                return outputs
            finally:
                inside.call = False

        return imitate(recorded, call)

    def _begin(self, module: Module, args: Any, kwargs: Any) -> Record | None:
        if len(self.records) >= _MAX_RECORDS or (torch.cuda.is_initialized() and _is_capturing()):
            return None
        self._mark_lines(False)
        wanted: set[int] = set()
        versions: list[tuple[Tensor, int | None]] = []

        def keep(tensor: Tensor) -> Tensor:
            kept = tensor.detach()
            if tensor.requires_grad and tensor.is_floating_point():
                wanted.add(id(kept))
            versions.append((kept, version_of(kept)))
            return kept

        inputs = map_tensors((args, kwargs), keep)
        kind = self._casts.device_type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return Record(
            weakref.ref(module), inputs, frozenset(wanted), versions, RandomStates.now(all_of_them=self.thorough),
            self._casts.switches(), autocast, self._copies(module), unfit=_unfit(module),
        )  # fmt: skip

    def _copies(self, module: Module) -> dict[str, Tensor]:
        """Return copies of those buffers that calls write to, as far as known; of all before the second call."""
        names = self._buffers.get(module)
        if names is None:
            found = dict(module.named_buffers())
            small = sum(buffer.numel() for buffer in found.values()) <= _MAX_BUFFER_ELEMENTS
            self._buffers[module] = list(found) if small else []
            names = self._buffers[module]
        if not names:
            return {}
        with torch.no_grad():
            return {name: module.get_buffer(name).detach().clone() for name in names}

    def _end(self, record: Record | None, outputs: Any) -> None:
        if record is None:
            return
        numbers: dict[Any, int] = {}
        for output in iter_tensors(outputs):
            if not output.is_floating_point() or output.layout is not torch.strided:
                record.sums.append(None)
                record.nodes.append(None)
                continue
            with torch.no_grad():
                record.sums.append(_sum(output.detach()))
            node = output.grad_fn
            if node is None:
                record.nodes.append(None)
                continue
            if node not in numbers:
                numbers[node] = len(numbers)
                self._hook(record, node, numbers[node])
            record.nodes.append((numbers[node], output.output_nr))
        self.records.append(record)
        self._mark_lines(self.thorough)

    def _hook(self, record: Record, node: Any, number: int) -> None:
        node.metadata[_KEY] = True

        def arrived(gradients: Sequence[Any]) -> None:
            size = sum(g.numel() * g.element_size() for g in gradients if g is not None)
            if self._bytes + size > _MAX_BYTES:
                record.too_large = True
                return
            self._bytes += size
            record.gradients[number] = [None if g is None else g.detach() for g in gradients]

        node.register_prehook(arrived)

    # -- losses --

    def note_loss(self, loss: Tensor) -> None:
        """Take note of a loss, and of the nodes between it and the outputs of modules."""
        lines_known = self._anomaly is not None
        self._mark_lines(False)
        if self.paused:
            return
        region = LossRegion(loss.detach(), user_line(sys._getframe(1)))
        waiting, known = [loss.grad_fn], set()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in known or getattr(node, "variable", None) is not None:
                continue
            known.add(node)
            metadata = node.metadata
            if _KEY in metadata:
                continue
            if len(known) > _MAX_NODES:
                region.whole = False
                break
            line = _line_in(metadata.get("traceback_")) if lines_known else None
            node.register_hook(_leave_trace(region, NodeTrace(node.name(), line)))
            waiting.extend(following for following, _ in node.next_functions)
        self.losses.append(region)

    def _mark_lines(self, on: bool) -> None:
        """Let torch note the line that makes each node of a graph, as its anomaly mode does, or no more."""
        if on and self._anomaly is None:
            self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=self._anomaly[0] and self._anomaly[1])
        elif not on and self._anomaly is not None:
            (enabled, checks), self._anomaly = self._anomaly, None
            torch.autograd.set_detect_anomaly(enabled, check_nan=checks)


def _leave_trace(region: LossRegion, trace: NodeTrace) -> Callable[[Any, Any], None]:
    def ran(gave: Sequence[Any], got: Sequence[Any]) -> None:
        trace.got, trace.gave = [_kept(g) for g in got], [_kept(g) for g in gave]
        trace.dtypes = [None if g is None else g.dtype for g in gave]
        region.traces.append(trace)

    return ran


def _kept(gradient: Any) -> Any:
    """Return a gradient, or the fp32 sum of one that is too large to be kept."""
    if gradient is None or not gradient.is_floating_point():
        return None
    return gradient.detach() if gradient.numel() <= 2**16 else _sum(gradient.detach())


def _sum(tensor: Tensor) -> Tensor:
    result: Tensor = original_of(Tensor.sum)(tensor, dtype=torch.float32)
    return result


def _line_in(traceback: Any) -> str | None:
    """Return ``"file:line"`` of the innermost line of the program in a traceback that torch noted."""
    for text in reversed(traceback or ()):
        head = str(text).strip().partition("\n")[0]
        if head.startswith('File "'):
            file, _, rest = head[6:].partition('", line ')
            number = rest.partition(",")[0]
            if not any(
                f"/{name}/" in file.replace("\\", "/") for name in ("torch", "autoamp/diagnostics")
            ) and not _is_ours(file):
                return f"{file}:{number}"
    return None


def _is_ours(file: str) -> bool:
    package = __file__.rpartition("diagnostics")[0]
    return file.startswith(package)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _unfit(module: Module) -> str | None:
    """Return why calls of a module cannot be run again, as far as the module itself tells; None where they can."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "the model is a compiled region"
    if isinstance(module, (torch.jit.ScriptModule, types.FunctionType)):
        return "the model is a TorchScript module"
    if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
        return f"{type(module).__name__} gathers the model from several devices"
    return None
