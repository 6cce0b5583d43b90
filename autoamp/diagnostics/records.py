"""What is kept of each step, so that it can be run again if it overflows: references, random states, fp32 sums.

A record is of an outermost module call in which gradients are recorded: its arguments, without their graph, and the
random states before it. Of its outputs one fp32 sum each is kept, and the gradients that came back to them. It lives as
long as the graph, or until the step once gradients came back. Of what is computed between the outputs and the loss,
each node of the graph leaves what went through it.

Lines of these nodes are what torch's anomaly mode notes. That is slow, so it is on for the first step alone, and
whenever a graph of another shape is met: the lines are remembered by the shape of the graph.
"""

from __future__ import annotations

import contextlib
import math
import operator
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
from autoamp.diagnostics.inspector import flaw_of, sum_of, user_line, worst_of
from autoamp.diagnostics.saved_values import Made, first_not_finite, gradient_is_finite_in_fp32, made_by
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors, version_of
from autoamp.torch_private import current_graph_task

__all__ = ["LossRegion", "NodeTrace", "RandomStates", "Record", "Recorder"]

_KEY = "autoamp.diagnostics"
# Of a step no more is kept than this: bytes of gradients at outputs, calls, nodes between outputs and loss.
_MAX_BYTES = 2**28
_MAX_RECORDS = 256
_MAX_NODES = 64
_MAX_BUFFER_ELEMENTS = 2**20
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
# Of so many shapes of graphs the lines are remembered; a program with more is not slowed down for them.
_MAX_SHAPES = 16


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
        passes: What came back to each node, by the number of the loss since the last step, and by the node's.
        unfit: Why it cannot be run again; None where it can.
        too_large: Whether gradients came back that are not kept, since they are too large.
        number: Of the call.
        size: Of its inputs in bytes.
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
    passes: dict[int, dict[int, Sequence[Any]]] = field(default_factory=dict)
    unfit: str | None = None
    too_large: bool = False
    number: int = 0
    size: int = 0

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


@dataclass(eq=False)
class NodeTrace:
    """What went through one node between outputs and loss: gradients, or the fp32 sums of large ones.

    Attributes:
        name: Of the node.
        line: The line of the program that made it; None if unknown.
        got, gave: The gradients.
        dtypes: Of those that it gave.
        finite_at_one: Where it made inf or nan, whether it gives finite gradients at a loss scale of 1; None if that
            was not looked at.
        finite_in_fp32: Where it made inf or nan, whether it had not in fp32; None if that is not known.
    """

    name: str
    line: str | None
    got: Sequence[Any] = ()
    gave: Sequence[Any] = ()
    dtypes: Sequence[torch.dtype | None] = ()
    finite_at_one: bool | None = None
    finite_in_fp32: bool | None = None


@dataclass(eq=False)
class LossRegion:
    """What is computed between the outputs of modules and one loss.

    Attributes:
        loss: The loss, without its graph.
        line: The line of the program at which it was scaled.
        traces: Of its nodes, in the order in which they ran: where they are looked at, those that made inf or nan.
        whole: Whether all of its nodes are among them.
        first: Where the loss is not finite, the node whose op made that of finite values, as far as saved values tell,
            and what they tell of that op.
        nodes: The nodes, as long as their backward pass may run, where one that makes inf or nan is to be run again.
        start: The first gradient of all, which is the loss scale; None before the pass.
    """

    loss: Tensor
    line: str | None
    traces: list[NodeTrace] = field(default_factory=list)
    whole: bool = True
    first: tuple[NodeTrace, Made] | None = None
    nodes: list[Any] = field(default_factory=list)
    start: Tensor | None = None

    def is_searching(self) -> bool:
        """Tell whether the loss is finite, and its first gradients that are not were found to be so at a scale of 1."""
        return flaw_of(self.loss) is None and any(trace.finite_at_one for trace in self.traces)


_number_of = operator.attrgetter("number")


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
        inside: Tells of each thread whether it is within a call that is recorded.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self.records: list[Record] = []
        self.losses: list[LossRegion] = []
        self.thorough = False
        self.paused = False
        self.inside = _Inside()
        self._begun: list[weakref.ref[Record]] = []
        self._number = 0
        self._bytes = 0
        self._buffers: weakref.WeakKeyDictionary[Module, list[tuple[str, weakref.ref[Module], str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._anomaly: tuple[bool, bool] | None = None
        # Lines by the shape of the graph between outputs and loss. The first step finds a new one.
        self._lines: dict[Any, tuple[str | None, ...]] = {}
        self._wants_lines = True

    def take(self) -> tuple[list[Record], list[LossRegion]]:
        """Return what there is, and begin anew."""
        if self._anomaly is not None:
            self._mark_lines(False)
        self._let_go()
        taken = sorted(self.records, key=_number_of) if len(self.records) > 1 else self.records, self.losses
        self.records, self.losses, self._begun, self._bytes = [], [], [], 0
        return taken

    def close(self) -> None:
        """Drop all, and leave torch as it was."""
        self.take()
        self._wants_lines = not self._lines

    def record(self, call: Callable[..., Any], module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, and keep a record of that unless nothing is to be kept; see `autoamp.modules.CallRecorder`."""
        # Within a backward pass it is a checkpoint that computes again what is recorded.
        if self.paused or not torch.is_grad_enabled() or current_graph_task() != -1 or torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        self.inside.call = True
        try:
            record = self._begin(module, args, kwargs)
            outputs = call(module, *args, **kwargs)
            if record is not None:
                self._end(record, outputs)
            return outputs
        finally:
            self.inside.call = False

    def _begin(self, module: Module, args: Any, kwargs: Any) -> Record | None:
        if len(self._begun) >= _MAX_RECORDS:
            self._begun = [known for known in self._begun if known() is not None]
        if len(self._begun) >= _MAX_RECORDS or (torch.cuda.is_initialized() and _is_capturing()):
            return None
        if self._anomaly is not None:
            self._mark_lines(False)
        wanted: set[int] = set()
        versions: list[tuple[Tensor, int | None]] = []
        size = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal size
            kept = tensor.detach()
            if tensor.requires_grad and tensor.is_floating_point():
                wanted.add(id(kept))
            versions.append((kept, version_of(kept)))
            size += kept.numel() * kept.element_size()
            return kept

        inputs = map_tensors((args, kwargs), keep)
        kind = self._casts.device_type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._number += 1
        return Record(
            weakref.ref(module), inputs, frozenset(wanted), versions, RandomStates.now(all_of_them=self.thorough),
            self._casts.switches(), autocast, self._copies(module), unfit=_unfit(module), number=self._number,
            size=size,
        )  # fmt: skip

    def _copies(self, module: Module) -> dict[str, Tensor]:
        """Return copies of the buffers that a call may write to and go by."""
        places = self._buffers.get(module)
        if places is None:
            # What a batch norm computes in training does not depend on its running averages.
            places = [
                (f"{path}.{name}".removeprefix("."), weakref.ref(owner), name)
                for path, owner in module.named_modules()
                if not (isinstance(owner, _BATCH_NORMS) and owner.training)
                for name in dict(owner.named_buffers(recurse=False))
            ]
            if sum(buffer.numel() for buffer in module.buffers()) > _MAX_BUFFER_ELEMENTS:
                places = []
            self._buffers[module] = places
        found: dict[str, Tensor] = {}
        for path, reference, name in places:
            owner = reference()
            buffer = None if owner is None else owner._buffers.get(name)
            if buffer is not None:
                found[path] = buffer.detach().clone()
        return found

    def _end(self, record: Record, outputs: Any) -> None:
        numbers: dict[Any, int] = {}
        for output in iter_tensors(outputs):
            if not output.is_floating_point() or output.layout is not torch.strided:
                record.sums.append(None)
                record.nodes.append(None)
                continue
            record.sums.append(sum_of(output.detach()))
            node = output.grad_fn
            if node is None:
                record.nodes.append(None)
                continue
            if node not in numbers:
                numbers[node] = len(numbers)
                self._hook(record, node, numbers[node])
            record.nodes.append((numbers[node], output.output_nr))
        self._begun.append(weakref.ref(record))
        if numbers:
            # From here on the graph holds the record.
            if self.thorough or self._wants_lines:
                self._mark_lines(True)
        elif self._bytes + record.size <= _MAX_BYTES:
            self._bytes += record.size
            self.records.append(record)

    def _hook(self, record: Record, node: Any, number: int) -> None:
        node.metadata[_KEY] = True

        def arrived(gradients: Sequence[Any]) -> None:
            # A pass before any loss is scaled, as for a penalty on gradients, is a part of the forward pass.
            if not self.losses or self.paused:
                return
            if not record.passes:
                self.records.append(record)
            given = record.passes.setdefault(len(self.losses) - 1, {})
            kept: list[Tensor | None] = []
            size = 0
            for gradient in gradients:
                kept.append(_without_graph(gradient))
                size += 0 if gradient is None else gradient.numel() * gradient.element_size()
            if self._bytes + size > _MAX_BYTES:
                record.too_large = True
                return
            self._bytes += size
            given[number] = kept

        node.register_prehook(arrived)

    # -- losses --

    def note_loss(self, loss: Tensor) -> None:
        """Take note of a loss, and of the nodes between it and the outputs of modules."""
        lines_noted = self._anomaly is not None
        if lines_noted:
            self._mark_lines(False)
        if self.paused:
            return
        self._let_go()
        region = LossRegion(loss.detach(), user_line(sys._getframe(1)))
        nodes, names = self._nodes_of(loss, region)
        lines = self._lines_of(region, nodes, names, lines_noted)
        # On a CPU it is known already what the values are; elsewhere asking would wait for the device.
        looks = self.thorough or loss.device.type == "cpu"
        if looks and not _is_finite(region.loss):
            place = first_not_finite(nodes, loss.dtype not in HALF_DTYPES)
            region.first = (
                None if place is None else (NodeTrace(names[place], lines[place]), made_by(nodes[place], nodes))
            )
        # It refers to neither the nodes nor what holds them.
        owner = weakref.ref(region)
        for place, name in enumerate(names):
            if not name.startswith(_HARMLESS):
                trace = NodeTrace(name, lines[place])
                nodes[place].register_hook(_looking(owner, trace, place) if looks else _keeping(owner, trace))
            elif place == 0:
                nodes[0].register_hook(_starting(owner))
        region.nodes = nodes if looks else []
        self.losses.append(region)

    def _let_go(self) -> None:
        """Keep no graph of earlier losses alive."""
        for region in self.losses:
            region.nodes = []

    def _nodes_of(self, loss: Tensor, region: LossRegion) -> tuple[list[Any], list[str]]:
        """Return the nodes between outputs of modules and a loss, each before what it follows from, and their names."""
        waiting: list[Any] = [loss.grad_fn]
        known: dict[Any, str] = {}
        while waiting:
            node = waiting.pop()
            if node is None or node in known:
                continue
            name = node.name()
            if name.endswith("AccumulateGrad") or _KEY in node.metadata:
                continue
            if len(known) >= _MAX_NODES:
                region.whole = False
                break
            known[node] = name
            for following, _ in node.next_functions:
                waiting.append(following)
        return list(known), list(known.values())

    def _lines_of(
        self, region: LossRegion, nodes: Sequence[Any], names: Sequence[str], noted: bool
    ) -> Sequence[str | None]:
        """Return the line of each node, as far as known of this graph or of others of its shape."""
        shape = region.line, *names
        if not noted:
            self._wants_lines = shape not in self._lines and len(self._lines) < _MAX_SHAPES
            return self._lines.get(shape) or (None,) * len(nodes)
        lines = tuple(_line_in(node.metadata.get("traceback_")) for node in nodes)
        before = self._lines.get(shape, lines)
        if len(self._lines) < _MAX_SHAPES or shape in self._lines:
            # Where graphs of one shape are made at several lines, none of them is named.
            self._lines[shape] = tuple(one if one == other else None for one, other in zip(before, lines, strict=True))
        self._wants_lines = False
        return lines

    def _mark_lines(self, on: bool) -> None:
        """Let torch note the line that makes each node of a graph, as its anomaly mode does, or no more."""
        if on and self._anomaly is None:
            self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=self._anomaly[0] and self._anomaly[1])
        elif not on and self._anomaly is not None:
            (enabled, checks), self._anomaly = self._anomaly, None
            torch.autograd.set_detect_anomaly(enabled, check_nan=checks)


# Nodes that hand gradients on, or parts of them. Of finite ones they make neither inf nor nan.
_HARMLESS = tuple(
    f"{name}Backward"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Alias",
                 "Clone", "Neg", "Mean", "Sum")
)  # fmt: skip


def _starting(region: weakref.ref[LossRegion]) -> Callable[[Any, Any], None]:
    """Return a hook of the first node, where that is harmless."""

    def ran(gave: Sequence[Any], got: Sequence[Any]) -> None:
        found = region()
        if found is not None:
            found.start = got[0]

    return ran


def _looking(region: weakref.ref[LossRegion], trace: NodeTrace, place: int) -> Callable[[Any, Any], None]:
    """Return a hook that looks at what a node gives, at once: while what the node saved is there still.

    Args:
        region: Gets the trace where the node made inf or nan of finite gradients.
        trace: Of the node.
        place: Of the node in the region.
    """

    def ran(gave: Sequence[Any], got: Sequence[Any]) -> None:
        found = region()
        if found is None:
            return
        if place == 0:
            found.start = got[0]
        for gradient in gave:
            if gradient is not None and not _is_finite(gradient):
                break
        else:
            return
        if found.nodes and worst_of(got) is None:
            trace.got, trace.gave = [_without_graph(g) for g in got], [_without_graph(g) for g in gave]
            trace.dtypes = [None if g is None else g.dtype for g in gave]
            trace.finite_at_one = _finite_at_one(found, found.nodes[place], got)
            trace.finite_in_fp32 = gradient_is_finite_in_fp32(found.nodes[place], found.nodes, got)
            found.traces.append(trace)

    return ran


def _keeping(region: weakref.ref[LossRegion], trace: NodeTrace) -> Callable[[Any, Any], None]:
    """Return a hook that keeps what goes through a node, for whoever looks later."""

    def ran(gave: Sequence[Any], got: Sequence[Any]) -> None:
        found = region()
        if found is not None:
            trace.got, trace.gave = [_kept(g) for g in got], [_kept(g) for g in gave]
            trace.dtypes = [None if g is None else g.dtype for g in gave]
            found.traces.append(trace)

    return ran


def _is_finite(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return True
    # A finite sum has finite terms. One that is not may have overflowed itself.
    value = tensor if tensor.numel() == 1 else sum_of(tensor)
    return math.isfinite(value.item()) or flaw_of(tensor) is None


def _without_graph(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient, which has a graph of its own under ``create_graph=True``."""
    return gradient.detach() if gradient is not None and gradient.requires_grad else gradient


def _finite_at_one(region: LossRegion, node: Any, got: Sequence[Any]) -> bool | None:
    """Tell whether a node, whose saved values are still there, gives finite gradients at a loss scale of 1."""
    # The first gradient of all is the loss scale.
    first = region.start
    scale = float(first.abs().max()) if first is not None and first.numel() else 1.0
    with torch.no_grad(), contextlib.suppress(Exception):
        gave = node(*(g if g is None else g / scale for g in got))
        return worst_of(list(iter_tensors(gave))) is None
    return None


def _kept(gradient: Any) -> Any:
    """Return a gradient, or the fp32 sum of one that is large."""
    if gradient is None or not gradient.is_floating_point():
        return None
    return gradient.detach() if gradient.numel() <= 2**16 else sum_of(gradient.detach())


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
