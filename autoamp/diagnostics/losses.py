"""What is computed between the outputs of modules and a loss: its nodes, their lines, and which made inf or nan.

Lines of nodes are what torch's anomaly mode notes. That is slow, so it is on for the first step alone, and whenever a
graph of another shape is met: what is known of a shape is remembered.

A node that could make inf or nan of finite gradients gets a hook. On a CPU the hook looks at what the node gives, at
once: while what the node saved is there still. Elsewhere looking would wait for the device, and the hook keeps what
goes through the node for whoever looks later.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from autoamp.diagnostics.findings import shown_line
from autoamp.diagnostics.inspector import Flaw, flaw_of, sum_of, user_place, worst_of
from autoamp.diagnostics.op_names import fp32_entry, spellings
from autoamp.diagnostics.saved_values import Made, first_not_finite, gradient_is_finite_in_fp32, made_by
from autoamp.diagnostics.verdicts import (
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.tensors import HALF_DTYPES, iter_tensors

__all__ = ["LossRecorder", "LossRegion", "in_loss", "in_unwatched", "without_graph"]

_KEY = "autoamp.diagnostics"
# So many nodes of one loss are looked at, and of so many shapes of graphs it is remembered what is known: a program
# with more is not slowed down for them.
_MAX_NODES = 64
_MAX_SHAPES = 16
_MAX_NAMES = 512
_MAX_DECISIONS = 8
# Nodes that hand gradients on, or parts of them. Of finite ones they make neither inf nor nan.
_HARMLESS = frozenset(
    ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Alias", "Clone", "Neg",
     "Mean", "Sum", "Select", "Slice", "Split", "Unbind", "Cat", "Stack", "Relu", "Threshold", "MaskedFill", "Where",
     "Clamp", "ClampMin", "ClampMax")
)  # fmt: skip
# Where the loss is finite, these make inf of finite gradients in fp32 at scales or by weights that no program has, and
# nan of outputs that are not finite. The first ones give no gradient that is larger than that of the loss, if there is
# no such weight: a cast after them overflows by the loss scale alone. So once they were seen to give fp32 nobody looks
# at them, nor at such a cast, and they are blamed where nothing else can be.
_BOUNDED = frozenset(("NllLoss", "NllLoss2D", "LogSoftmax", "SmoothL1Loss"))
_HARMLESS_IN_FP32 = _BOUNDED | {"MseLoss", "HuberLoss", "BinaryCrossEntropyWithLogits"}


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
class _Shape:
    """What is known of graphs of one shape.

    Attributes:
        names: Of the nodes.
        lines: Of the program, by node; None if unknown.
        fragile: The places of nodes that may make inf or nan of finite gradients.
        watched: Those of them that get a hook in each step.
        is_scalar: Whether the loss is one number, whose gradient is the loss scale.
        undecided: In how many more looks at a node, by its place, it is asked whether it is to have a hook.
    """

    names: tuple[str, ...]
    lines: tuple[str | None, ...]
    fragile: tuple[int, ...]
    watched: tuple[int, ...]
    is_scalar: bool
    undecided: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True, weakref_slot=True)
class LossRegion:
    """What is computed between the outputs of modules and one loss.

    Attributes:
        loss: The loss, without its graph; a number where nobody had to wait for it.
        place: The file and the line of the program at which it was scaled.
        scale: By what.
        shape: What is known of its graph.
        lines: Of the program, by node; None if unknown.
        watched: The places of the nodes that have hooks.
        traces: Of its nodes, in the order in which they ran: where they are looked at, those that made inf or nan.
        whole: Whether all of its nodes are among those of its shape.
        first: Where the loss is not finite, the node whose op made that of finite values, as far as saved values tell,
            and what they tell of that op.
        nodes: The nodes, as long as their backward pass may run, where one that makes inf or nan is to be run again.
    """

    loss: Tensor | float
    place: tuple[str, int] | None
    scale: SupportsFloat
    shape: _Shape
    lines: tuple[str | None, ...]
    watched: tuple[int, ...]
    whole: bool
    nodes: list[Any] = field(default_factory=list)
    traces: list[NodeTrace] = field(default_factory=list)
    first: tuple[NodeTrace, Made] | None = None

    @property
    def line(self) -> str | None:
        """The line of the program at which the loss was scaled, as ``"file:line"``."""
        return None if self.place is None else f"{self.place[0]}:{self.place[1]}"

    def flaw(self) -> Flaw | None:
        """Return what is not finite in the loss; None where all is."""
        if isinstance(self.loss, Tensor):
            return flaw_of(self.loss)
        return None if math.isfinite(self.loss) else Flaw(math.isinf(self.loss), math.isnan(self.loss))

    def is_searching(self) -> bool:
        """Tell whether the loss is finite, and its first gradients that are not were found to be so at a scale of 1."""
        return any(trace.finite_at_one for trace in self.traces) and self.flaw() is None

    def trace_of(self, place: int) -> NodeTrace:
        """Return an empty trace of a node."""
        return NodeTrace(self.shape.names[place], self.lines[place])

    def unwatched(self, arrived: Sequence[Tensor | None]) -> NodeTrace | None:
        """Return the trace of a node without a hook that made inf or nan; None where none can have.

        Args:
            arrived: What came back to the outputs of a module, not all of it finite.
        """
        places = [place for place in self.shape.fragile if place not in self.watched]
        flaw = worst_of(arrived)
        if not places or flaw is None:
            return None
        casts = [place for place in places if _stem_of(self.shape.names[place]) == "ToCopy"]
        # Inf comes of a cast, else of a weight that the first multiplied by, and nan of what the last of them saved.
        others = [place for place in places if place not in casts]
        found = (others or casts)[-1] if flaw.nan else (casts or others)[0]
        trace = self.trace_of(found)
        trace.gave = list(arrived)
        trace.finite_in_fp32 = found in casts
        trace.dtypes = [None if one is None or found not in casts else one.dtype for one in arrived]
        return trace


class LossRecorder:
    """Takes note of losses that are scaled.

    Attributes:
        losses: Those since the last step.
        thorough: Whether all nodes that may make inf or nan get a hook, on any device, and lines are noted.
        notes_lines: Whether torch is noting lines.
    """

    def __init__(self) -> None:
        self.losses: list[LossRegion] = []
        self.thorough = self.notes_lines = False
        # The names of the nodes of outputs of modules, which are marked: of others nobody asks for marks.
        self._ends: set[str] = set()
        self._names: dict[type, str] = {}
        self._anomaly = False, False
        # The first step finds a new shape.
        self._shapes: dict[Any, _Shape] = {}
        self._wants_lines = True

    def take(self) -> list[LossRegion]:
        """Return what there is, and begin anew."""
        if self.notes_lines:
            self.end_lines()
        taken, self.losses = self.losses, []
        _let_go(taken)
        return taken

    def close(self) -> None:
        """Leave torch as it was."""
        if self.notes_lines:
            self.end_lines()
        self._wants_lines = not self._shapes

    def mark_end(self, node: Any) -> None:
        """Mark the node of an output of a module: what is before it belongs to no loss."""
        node.metadata[_KEY] = True
        self._ends.add(self._names.get(type(node)) or self._name_of(node))

    def note(self, loss: Tensor, scale: SupportsFloat) -> None:
        """Take note of a loss, and of the nodes between it and the outputs of modules."""
        if noted := self.notes_lines:
            self.end_lines()
        if self.losses:
            _let_go(self.losses)
        # Those who called this one are ours.
        place = user_place(sys._getframe(3))
        nodes, names = self._nodes_of(loss)
        is_scalar = loss.numel() == 1
        shape, lines = self._shape_of((place, loss.dtype, is_scalar, names), nodes, noted)
        # On a CPU it is known already what the values are; elsewhere asking would wait for the device.
        looks = self.thorough or loss.is_cpu
        value = loss.item() if looks and is_scalar else loss.detach()
        watched = shape.fragile if self.thorough else shape.watched
        region = LossRegion(value, place, scale, shape, lines, watched, len(nodes) < _MAX_NODES)
        if looks:
            region.nodes = nodes
            if not (math.isfinite(value) if is_scalar else region.flaw() is None):
                first = first_not_finite(nodes, loss.dtype not in HALF_DTYPES)
                region.first = None if first is None else (region.trace_of(first), made_by(nodes[first], nodes))
        # It refers to neither the nodes nor what holds them.
        owner, hook = weakref.ref(region), _look if looks else _keep
        for number in watched:
            nodes[number].register_hook(functools.partial(hook, owner, number))
        self.losses.append(region)

    def _nodes_of(self, loss: Tensor) -> tuple[list[Any], tuple[str, ...]]:
        """Return the nodes between outputs of modules and a loss, each before what it follows from, and their names."""
        waiting: list[Any] = [loss.grad_fn]
        known: dict[Any, str] = {}
        names, ends = self._names, self._ends
        while waiting:
            node = waiting.pop()
            if node is None or node in known:
                continue
            name = names.get(type(node)) or self._name_of(node)
            if name == "AccumulateGrad" or (name in ends and _KEY in node.metadata):
                continue
            if len(known) >= _MAX_NODES:
                break
            known[node] = name
            for following, _ in node.next_functions:
                waiting.append(following)
        return list(known), tuple(known.values())

    def _name_of(self, node: Any) -> str:
        """Return the name of a node, and remember it where all nodes of its type have it."""
        name = str(node.name()).rpartition("::")[2]
        if name == type(node).__name__:
            if len(self._names) >= _MAX_NAMES:
                self._names.clear()
            self._names[type(node)] = name
        return name

    # -- lines --

    def _shape_of(
        self, key: tuple[tuple[str, int] | None, torch.dtype, bool, tuple[str, ...]], nodes: Sequence[Any], noted: bool
    ) -> tuple[_Shape, tuple[str | None, ...]]:
        """Return what is known of a graph by others of its shape, and its lines: where they were noted, its own."""
        shape = self._shapes.get(key)
        has_room = len(self._shapes) < _MAX_SHAPES
        if shape is None:
            fragile = tuple(number for number, name in enumerate(key[3]) if _stem_of(name) not in _HARMLESS)
            undecided = dict.fromkeys(fragile, _MAX_DECISIONS)
            shape = _Shape(key[3], (None,) * len(nodes), fragile, fragile, key[2], undecided)
        elif not noted:
            self._wants_lines = False
            return shape, shape.lines
        if not noted:
            self._wants_lines = has_room
            return shape, shape.lines
        self._wants_lines = False
        lines = tuple(_line_in(node.metadata.get("traceback_")) for node in nodes)
        if key in self._shapes:
            # Where graphs of one shape are made at several lines, none of them is named.
            shape.lines = tuple(one if one == other else None for one, other in zip(shape.lines, lines, strict=True))
        elif has_room:
            shape.lines, self._shapes[key] = lines, shape
        return shape, lines

    def begin_lines(self) -> None:
        """Let torch note the line that makes each node of a graph, as its anomaly mode does, where that is wanted."""
        if not self.notes_lines and (self.thorough or self._wants_lines):
            self.notes_lines = True
            self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=self._anomaly[0] and self._anomaly[1])

    def end_lines(self) -> None:
        """Let torch note lines no more than it did before `begin_lines`."""
        self.notes_lines = False
        torch.autograd.set_detect_anomaly(self._anomaly[0], check_nan=self._anomaly[1])


# -- hooks --


def _let_go(regions: Sequence[LossRegion]) -> None:
    """Keep no graph of losses alive."""
    for region in regions:
        region.nodes = []


def _look(owner: weakref.ref[LossRegion], place: int, gave: Sequence[Any], got: Sequence[Any]) -> None:
    """Look at what a node gives, at once: while what the node saved is there still."""
    region = owner()
    if region is None:
        return
    for gradient in gave:
        if gradient is not None and not _is_finite(gradient):
            break
    else:
        if place in region.shape.undecided:
            _let_be(region, place, gave)
        return
    if region.nodes and worst_of(got) is None:
        trace = region.trace_of(place)
        trace.got, trace.gave = [without_graph(g) for g in got], [without_graph(g) for g in gave]
        trace.dtypes = [None if g is None else g.dtype for g in gave]
        trace.finite_at_one = _finite_at_one(region.nodes[place], got, float(region.scale))
        trace.finite_in_fp32 = gradient_is_finite_in_fp32(region.nodes[place], region.nodes, got)
        region.traces.append(trace)


def _keep(owner: weakref.ref[LossRegion], place: int, gave: Sequence[Any], got: Sequence[Any]) -> None:
    """Keep what goes through a node, for whoever looks later."""
    region = owner()
    if region is not None:
        trace = region.trace_of(place)
        trace.got, trace.gave = [_kept(g) for g in got], [_kept(g) for g in gave]
        trace.dtypes = [None if g is None else g.dtype for g in gave]
        region.traces.append(trace)
        if place in region.shape.undecided:
            _let_be(region, place, gave)


def _let_be(region: LossRegion, place: int, gave: Sequence[Any]) -> None:
    """Give a node no hook in steps to come if it is harmless in fp32, and gives that, or casts what such nodes give."""
    shape = region.shape
    shape.undecided[place] -= 1
    if not shape.undecided[place]:
        del shape.undecided[place]
    stems = [_stem_of(name) for name in shape.names]
    if stems[place] == "ToCopy":
        let_be = shape.is_scalar and all(
            stems[one] == "ToCopy" or (stems[one] in _BOUNDED and one not in shape.watched) for one in shape.fragile
        )
    else:
        harmless = stems[place] in _HARMLESS_IN_FP32 or (stems[place] == "Pow" and _is_steep(region, place))
        let_be = harmless and all(g is None or g.dtype in _WIDE for g in gave)
    if let_be:
        shape.watched = tuple(one for one in shape.watched if one != place)


def _is_steep(region: LossRegion, place: int) -> bool:
    """Tell whether a power has an exponent of 1 or more, as squares have: where it is finite its derivative is."""
    exponent = getattr(region.nodes[place], "_saved_exponent", None) if region.nodes else None
    return isinstance(exponent, (int, float)) and exponent >= 1


_WIDE = frozenset((torch.float32, torch.float64))


@functools.lru_cache(maxsize=_MAX_NAMES)
def _stem_of(name: str) -> str:
    """Return the name of a node of torch's without its ending, or the name of another as it is."""
    stem, _, number = name.partition("Backward")
    return stem if number.isdigit() else name


def _is_finite(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return True
    # A finite sum has finite terms. One that is not may have overflowed itself.
    value = tensor if tensor.numel() == 1 else sum_of(tensor)
    return math.isfinite(value.item()) or flaw_of(tensor) is None


def without_graph(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient, which has a graph of its own under ``create_graph=True``."""
    return gradient.detach() if gradient is not None and gradient.requires_grad else gradient


def _finite_at_one(node: Any, got: Sequence[Any], scale: float) -> bool | None:
    """Tell whether a node, whose saved values are still there, gives finite gradients at a loss scale of 1."""
    # The node of a function that is written in Python cannot be called itself.
    run = getattr(node, "apply", node)
    with torch.no_grad(), contextlib.suppress(Exception):
        gave = run(*(g if g is None else g / scale for g in got))
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


# -- what is found in a loss --


def in_loss(region: LossRegion, scale: float) -> Overflow | None:
    """Return the finding for a loss whose computation, after the modules, made inf or nan; None where it did not.

    Its ops are known by the nodes of the graph, and their lines as far as torch noted them.
    """
    for trace in region.traces:
        if worst_of(trace.got) is not None:
            continue
        flaw = worst_of(trace.gave)
        if flaw is None:
            continue
        return _loss_finding(region, trace, flaw, scale)
    return _in_forward(region)


def _in_forward(region: LossRegion) -> Overflow | None:
    """Return the finding for a loss that is not finite itself, where it is known which of its ops made that."""
    flaw = region.flaw()
    if flaw is None or region.first is None:
        return None
    first, made = region.first
    return _of_node(region, first, _forward_verdict(first, made), "forward", made.flaw or flaw)


def in_unwatched(region: LossRegion, arrived: Sequence[Tensor | None], scale: float) -> Overflow | None:
    """Return the finding for a node of a loss that nobody looked at; None where none of these made inf or nan.

    Args:
        region: Of which no other node did, and whose loss is finite.
        arrived: What came back to the outputs of a module, not all of it finite.
        scale: The loss scale.
    """
    trace, flaw = region.unwatched(arrived), worst_of(arrived)
    return None if trace is None or flaw is None else _loss_finding(region, trace, flaw, scale)


def _loss_finding(region: LossRegion, trace: NodeTrace, flaw: Flaw, scale: float) -> Overflow:
    sizes = tuple(float(g.abs().max()) for g in trace.got if g is not None and g.numel())
    if (found := _in_forward(region)) is not None:
        return found
    in_the_loss = region.flaw()
    if in_the_loss is not None:
        at = "" if region.line is None else f" whose backward pass began at {shown_line(region.line)}"
        why = f"the loss{at} is not finite, and which of its ops made that is not known; use explain_overflow()"
        return Overflow(NotLocated(why), phase="forward", value=in_the_loss.value)
    searching = not flaw.nan and scale > 1.0
    if trace.finite_at_one or (trace.finite_at_one is None and searching):
        # Where nobody could look, the scale goes down in any case, and at 1 there is no doubt left.
        verdict: OverflowVerdict = ScaleSearch()
    elif trace.finite_in_fp32:
        verdict = HalfPrecisionOp(sizes, _half_of(trace.dtypes))
    elif trace.finite_in_fp32 is None:
        verdict = NotLocated(_NOT_KNOWN_IN_FP32)
    else:
        verdict = NotFiniteInFp32(magnitudes=sizes)
    return _of_node(region, trace, verdict, "backward", flaw)


_NOT_KNOWN_IN_FP32 = "it is not known whether fp32 would be finite; use explain_overflow()"


def _forward_verdict(first: NodeTrace, made: Made) -> OverflowVerdict:
    if made.is_half and made.finite_in_fp32:
        return HalfPrecisionOp(made.magnitudes, _half_of([made.dtype]), in_cast=_op_of(first.name) == "to")
    if made.finite_in_fp32 is None:
        return NotLocated(_NOT_KNOWN_IN_FP32)
    return NotFiniteInFp32(magnitudes=made.magnitudes)


def _half_of(dtypes: Sequence[torch.dtype | None]) -> str:
    return str(next((d for d in dtypes if d in HALF_DTYPES), torch.float16)).removeprefix("torch.")


def _of_node(region: LossRegion, trace: NodeTrace, verdict: OverflowVerdict, phase: str, flaw: Flaw) -> Overflow:
    op = _op_of(trace.name)
    is_op = _stem_of(trace.name) != trace.name
    names = spellings(op) if is_op and isinstance(verdict, HalfPrecisionOp) else ()
    suggestion = fp32_entry(names)
    if isinstance(verdict, HalfPrecisionOp) and not names:
        suggestion = "make the loss smaller, or let what makes the half tensor run in fp32: its gradient is too large"
    if isinstance(verdict, NotFiniteInFp32):
        suggestion = "look at the loss: compute it in a form that stays finite"
    return Overflow(
        verdict,
        op=op,
        location=shown_line(trace.line),
        phase=phase,
        suggestion=suggestion,
        value=flaw.value,
        fp32_names=names,
    )


# What a node is called, where that is not the name of its op.
_NODE_OPS = {"ToCopy": "to", "NllLoss": "nll_loss", "NllLoss2D": "nll_loss", "Expand": "expand"}


def _op_of(name: str) -> str:
    """Return the bare name of the op that made a node: ``mse_loss`` for ``MseLossBackward0``.

    That of a function of the program is the name of its class.
    """
    stem = _stem_of(name)
    if stem == name:
        return name.removesuffix("Backward")
    if stem in _NODE_OPS:
        return _NODE_OPS[stem]
    letters = "".join(f"_{one.lower()}" if one.isupper() else one for one in stem)
    return letters.strip("_")
