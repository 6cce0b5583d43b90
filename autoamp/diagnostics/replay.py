"""Running recorded module calls again, and finding what overflowed in them."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.diagnostics.call_sites import shown_file
from autoamp.diagnostics.inspector import (
    Backward,
    Flaw,
    Inspector,
    Origin,
    Site,
    flaw_of,
    named_inputs,
    sum_of,
    worst_of,
)
from autoamp.diagnostics.losses import LossRegion, NodeTrace
from autoamp.diagnostics.op_names import fp32_entry, spellings
from autoamp.diagnostics.records import RandomStates, Record
from autoamp.diagnostics.saved_values import Made
from autoamp.diagnostics.verdicts import (
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.scaling import is_sharded
from autoamp.stepping import several_processes
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors, version_of

__all__ = [
    "Attributes",
    "CannotReplay",
    "Replayed",
    "finest_scale",
    "forward_finding",
    "found_backward",
    "in_loss",
    "in_unwatched",
    "kept_state",
    "origin_finding",
    "output_finding",
    "replay",
    "search_scale",
    "unfit",
    "unwrapped",
    "with_all_names",
    "write",
]


class CannotReplay(Exception):
    """A recorded call cannot be run again; its message says why."""


@contextlib.contextmanager
def kept_state(modules: Sequence[Module]) -> Iterator[None]:
    """Put random generators, buffers and other attributes of modules back at the end of a ``with`` statement.

    Gradients are recorded in it. Of lists, dicts, sets and generators of random numbers that are attributes the
    contents are put back too; what lies deeper is not.
    """
    states = RandomStates.now(all_of_them=True)
    all_of_them = list(dict.fromkeys(each for module in modules for each in module.modules()))
    buffers = [(b, b.detach().clone()) for each in all_of_them for b in each.buffers(recurse=False)]
    attributes = [Attributes(each) for each in all_of_them]
    try:
        with torch.enable_grad():
            yield
    finally:
        states.restore()
        for one in attributes:
            one.put_back()
        for buffer, value in buffers:
            write(buffer, value)


def write(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer another value, unless it has it. A graph that is kept for another backward pass stays valid."""
    if not _same(buffer, value):
        with torch.no_grad():
            # Not counted as a write, since whoever reads the buffer finds what was there.
            buffer.data.copy_(value)


class Attributes:
    """What a module has beside its parameters, buffers and modules: counters, caches, generators.

    Args:
        module: The module.
    """

    def __init__(self, module: Module) -> None:
        self._own = vars(module)
        self._before = dict(self._own)
        self._put_back: list[Callable[[], object]] = []
        for name, value in self._before.items():
            if name.startswith("_") and name in _OF_TORCH:
                continue
            if isinstance(value, (list, collections.deque)):
                self._put_back.append(functools.partial(_refill, value, value.extend, list(value)))
            elif isinstance(value, (dict, set)):
                self._put_back.append(functools.partial(_refill, value, value.update, value.copy()))
            elif isinstance(value, torch.Generator):
                self._put_back.append(functools.partial(value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                self._put_back.append(functools.partial(value.setstate, value.getstate()))
            elif isinstance(value, numpy.random.Generator):
                state = copy.deepcopy(value.bit_generator.state)
                self._put_back.append(functools.partial(setattr, value.bit_generator, "state", state))

    def put_back(self) -> None:
        """Put all back."""
        for name in [name for name in self._own if name not in self._before]:
            del self._own[name]
        for name, value in self._before.items():
            if self._own.get(name, self) is not value:
                self._own[name] = value
        for put_back in self._put_back:
            put_back()


def _refill(container: Any, add: Callable[[Any], object], contents: Any) -> None:
    """Give a container what it held."""
    if len(container) != len(contents) or any(
        one is not other for one, other in zip(_flat(container), _flat(contents), strict=True)
    ):
        container.clear()
        add(contents)


def _flat(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


_OF_TORCH = frozenset(vars(Module()))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


@dataclass(eq=False)
class Replayed:
    """A recorded call that was run again, with its graph.

    Attributes:
        inspector: What looked on.
        outputs: The floating outputs, None in the place of others.
        inputs: The tensors that went in, with the names of the arguments.
        leaves: What gradients are taken of, by name.
    """

    inspector: Inspector
    outputs: list[Tensor | None]
    inputs: list[tuple[str, Tensor]]
    leaves: dict[str, Tensor]
    root: Module
    results: dict[str, Tensor] = field(default_factory=dict)

    def backward(self, gradients: Sequence[Tensor | None]) -> Backward:
        """Take the gradients of all leaves, and keep them in ``results``."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.outputs, gradients, strict=True)
            if output is not None and gradient is not None and output.requires_grad
        ]
        watch = Backward(self.inspector)
        self.results = {}
        if not pairs or not self.leaves:
            return watch
        names, leaves = list(self.leaves), list(self.leaves.values())
        outputs = [output for output, _ in pairs]
        given = [gradient.to(output.dtype) for output, gradient in pairs]
        with watch.watching():
            found = torch.autograd.grad(outputs, leaves, given, retain_graph=True, allow_unused=True)
        self.results = {name: one for name, one in zip(names, found, strict=True) if one is not None}
        return watch

    def flawed(self) -> dict[int, str]:
        """Return the names of the leaves whose gradients are not finite, by their ids."""
        return {id(self.leaves[name]): name for name, one in self.results.items() if flaw_of(one) is not None}


def _with_collectives(root: Module) -> str | None:
    """Return the class of what talks to other ranks in a model, which may not be run again at the same time."""
    for each in root.modules():
        kinds = {kind.__name__ for kind in type(each).__mro__}
        if several_processes() and kinds & _COLLECTIVE:
            return type(each).__name__
    if any(is_sharded(param) for param in root.parameters()):
        return "DTensors"
    return None


# As parts of a model. A DistributedDataParallel that is the whole model is taken off.
_COLLECTIVE = frozenset(
    ("SyncBatchNorm", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "PipelineStage")
)


def unwrapped(module: Module) -> Module:
    """Return the model within a wrapper that reduces gradients over ranks: its own calls reduce nothing."""
    inner = getattr(module, "module", None)
    wraps = any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)
    return inner if wraps and isinstance(inner, Module) else module


def unfit(module: Module) -> str | None:
    """Return why calls of a module cannot be run again, as far as the module itself tells; None where they can."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "the model is a compiled region"
    if isinstance(module, (torch.jit.ScriptModule, types.FunctionType)):
        return "the model is a TorchScript module"
    if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
        return f"{type(module).__name__} gathers the model from several devices"
    return None


def replay(record: Record, casts: Casts, *, wide: bool = False, check: bool = True) -> Replayed:
    """Run a recorded call again.

    Args:
        record: The call.
        casts: How threads cast.
        wide: Compute in fp32.
        check: Compare the outputs with those of the step, unless all is wide.

    Raises:
        CannotReplay: The model, or an input, is not as it was.
    """
    module = record.module()
    if module is None:
        raise CannotReplay("the model is gone")
    if (why := unfit(module)) is not None:
        raise CannotReplay(why)
    if record.written_to():
        raise CannotReplay("inputs of the model were written to")
    root = unwrapped(module)
    if (name := _with_collectives(root)) is not None:
        raise CannotReplay(f"the model has collectives of its own, those of {name}")
    again: list[Tensor] = []

    def leaf(kept: Tensor) -> Tensor:
        fresh = kept.detach()
        if id(kept) in record.wanted:
            fresh.requires_grad_()
        again.append(fresh)
        return fresh

    args, kwargs = map_tensors(record.inputs, leaf)
    own = {name.removeprefix("module.") if root is not module else name: b for name, b in record.buffers.items()}
    for name, value in own.items():
        write(root.get_buffer(name), value)
    if record.random is not None:
        record.random.restore()
    before = torch.get_rng_state()
    inspector = Inspector(root, wide=wide)
    switches = (False, True) if wide else record.switches
    kind = casts.device_type
    region = torch.autocast(kind, record.autocast or torch.float16, enabled=record.autocast is not None and not wide)
    with contextlib.nullcontext() if record.autocast is None else region, _switched(casts, switches), inspector:
        outputs = root(*args, **kwargs)
    if record.random is None and not torch.equal(torch.get_rng_state(), before):
        raise CannotReplay("the model draws random numbers, and did not when it was called before")
    found = [o if o.is_floating_point() and o.layout is torch.strided else None for o in iter_tensors(outputs)]
    result = Replayed(inspector, found, named_inputs(root, args, kwargs), {}, root)
    result.leaves = {name: p for name, p in root.named_parameters() if p.requires_grad}
    result.leaves.update({f"input {name}": t for name, t in result.inputs if t.requires_grad})
    if check and not wide:
        _check_same(record, result)
    return result


@contextlib.contextmanager
def _switched(casts: Casts, switches: Any) -> Iterator[None]:
    token = casts.local.set(*switches)
    try:
        yield
    finally:
        casts.local.reset(token)


def _check_same(record: Record, again: Replayed) -> None:
    """Raise where a replay did not give what the step did; see `CannotReplay`."""
    if len(again.outputs) != len(record.outputs):
        raise CannotReplay("run again, the model gave other outputs")
    for output, before in zip(again.outputs, record.outputs, strict=True):
        if (output is None) is not (before is None):
            raise CannotReplay("run again, the model gave other outputs")
        if isinstance(before, tuple):
            # What the program has written to since is not compared.
            before = sum_of(before[0]) if version_of(before[0]) == before[1] else None
        if output is None or before is None:
            continue
        now, then = float(sum_of(output.detach())), float(before)
        rough = 1e-2 * float(output.detach().float().abs().sum()) if math.isfinite(now) else 0.0
        if not (now == then or (math.isnan(now) and math.isnan(then)) or abs(now - then) <= rough):
            raise CannotReplay(
                "run again, the model gave other outputs: it draws random numbers of Python or numpy, or its weights "
                "or buffers have changed"
            )


# -- verdicts --


def given_finding(origin: Origin, again: Replayed) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    tensor, root = origin.tensor, again.root
    name = None if root is None else type(root).__name__
    common = {"phase": "forward", "value": origin.flaw.value}
    for argument, one in again.inputs:
        if tensor is not None and _is(one, tensor):
            index = batch_index(one)
            verdict = NotFiniteInFp32(cause="data", tensor=argument, batch_index=index)
            return Overflow(verdict, module=name, suggestion="look at the data of this batch", **common)  # type: ignore[arg-type]
    for path, one in [*root.named_parameters(), *root.named_buffers()]:
        if tensor is not None and _is(one, tensor):
            verdict = NotFiniteInFp32(cause="weights", tensor=path)
            owner = path.rpartition(".")[0] or name
            return Overflow(
                verdict, module=owner, suggestion="load an earlier checkpoint, or initialise it anew", **common  # type: ignore[arg-type]
            )  # fmt: skip
    return Overflow(NotFiniteInFp32(cause="model"), module=name, **common)  # type: ignore[arg-type]


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor is not finite; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = ~torch.isfinite(tensor.detach())
    rows = bad.reshape(bad.shape[0], -1).any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None


def of_site(site: Site, verdict: OverflowVerdict, phase: str, flaw: Flaw) -> Overflow:
    """Return the finding for what an op made, with the entry of a list file that avoids it where one does."""
    names = site.names if isinstance(verdict, HalfPrecisionOp) else ()
    return Overflow(
        verdict, op=site.op, module=site.module, location=_shown(site.location), phase=phase,
        suggestion=fp32_entry(names, site.in_place), value=flaw.value, fp32_names=names,
    )  # fmt: skip


def _shown(location: str | None) -> str | None:
    """Return ``"file:line"`` as people read it."""
    file, _, line = (location or "").rpartition(":")
    return f"{shown_file(file)}:{line}" if file else location


def origin_finding(origin: Origin, again: Replayed, widened: Callable[[], Origin | None]) -> Overflow:
    """Return the finding for an inf or nan of the forward pass.

    Args:
        origin: Where it is from, in half precision.
        again: The call that was run again.
        widened: Returns where what is not finite in fp32 is from; None where all is finite there.
    """
    if origin.site is None:
        return given_finding(origin, again)
    in_fp32 = widened()
    if in_fp32 is None:
        half = origin.site.dtype if origin.site.dtype in HALF_DTYPES else torch.float16
        verdict = HalfPrecisionOp(origin.magnitudes, str(half).removeprefix("torch."), origin.site.in_cast)
        return of_site(origin.site, verdict, "forward", origin.flaw)
    if in_fp32.site is None:
        return given_finding(in_fp32, again)
    return of_site(in_fp32.site, NotFiniteInFp32(magnitudes=in_fp32.magnitudes), "forward", in_fp32.flaw)


def forward_finding(record: Record, again: Replayed, casts: Casts, scale: float) -> Overflow | None:
    """Return the finding where an output of a call is not finite and spoils the gradients; None where none does."""
    flawed = [number for number, output in enumerate(again.outputs) if output is not None and flaw_of(output)]
    flawed = [number for number in flawed if record.takes_part(number)]
    if not flawed or (scale > 1.0 and _finite_at_one(record, again, scale)):
        return None
    for number in flawed:
        found = output_finding(record, again, casts, number, intended=False)
        if found is not None:
            return found
    return None


def _finite_at_one(record: Record, again: Replayed, scale: float) -> bool:
    """Tell whether all gradients are finite at a loss scale of 1, so that no inf of the forward pass is to blame."""
    for loss in record.passes:
        gradients = record.gradients_of(loss)
        if worst_of(gradients) is not None:
            return False
        again.backward([None if one is None else one / scale for one in gradients])
        if again.flawed():
            return False
    return True


def output_finding(
    record: Record, again: Replayed, casts: Casts, number: int, *, intended: bool
) -> Overflow | None:  # fmt: skip
    """Return the finding for an output that is not finite.

    Args:
        record, again: The call, and how it ran again.
        casts: How threads cast.
        number: Of the output.
        intended: Whether -inf is blamed as well that may have been written on purpose.
    """
    output = again.outputs[number]
    if output is None or flaw_of(output) is None:
        return None
    origin = again.inspector.origin_of(output)
    if origin.intended and not intended:
        return None

    def widened() -> Origin | None:
        wide = replay(record, casts, wide=True)
        value = wide.outputs[number]
        if value is None or flaw_of(value) is None:
            return None
        found = wide.inspector.origin_of(value)
        return None if found.intended and not intended else replace_tensors(found, wide, again)

    return origin_finding(origin, again, widened)


def replace_tensors(origin: Origin, one: Replayed, other: Replayed) -> Origin:
    """Return an origin whose tensor, an input of one replay, is the same input of the other."""
    for (_, mine), (_, theirs) in zip(one.inputs, other.inputs, strict=True):
        if origin.tensor is mine:
            return replace(origin, tensor=theirs)
    return origin


def search_scale(record: Record, again: Replayed, casts: Casts, scale: float, loss: int) -> Overflow | None:
    """Return the finding for gradients that are not finite though those at the outputs are; None where all are.

    The pass is run again at lower scales, of which the highest that does is found, and in fp32.

    Args:
        record, again: The call, and how it ran again.
        casts: How threads cast.
        scale: The loss scale.
        loss: The number of the loss whose pass it is.
    """
    gradients = record.gradients_of(loss)
    watch = again.backward(gradients)
    flawed = again.flawed()
    if not flawed:
        return None
    made = watch.producer(lambda tensor: id(tensor) in flawed)
    parameter = next((name for name in flawed.values() if not name.startswith("input ")), next(iter(flawed.values())))

    def finite_at(factor: float) -> bool:
        again.backward([None if one is None else one * factor for one in gradients])
        return not again.flawed()

    if scale > 1.0 and finite_at(1.0 / scale):
        return found_backward(made, ScaleSearch(finest_scale(scale, finite_at)), parameter)
    return _at_all_scales(record, again, casts, gradients, scale, made, parameter)


def _at_all_scales(
    record: Record, again: Replayed, casts: Casts, gradients: Sequence[Tensor | None], scale: float, made: Any,
    parameter: str,
) -> Overflow:  # fmt: skip
    source = None if made is None else made[0].source
    if source is not None and not source.intended:
        # The forward pass made it, though the outputs do not show it.
        def widened() -> Origin | None:
            wide = replay(record, casts, wide=True)
            origins = [one for one in wide.inspector.origins if not one.intended]
            return replace_tensors(origins[0], wide, again) if origins else None

        return replace(origin_finding(source, again, widened), parameter=parameter)
    wide = replay(record, casts, wide=True)
    in_fp32 = wide.backward([None if one is None else one.float() / scale for one in gradients])
    flawed = wide.flawed()
    wide_made = in_fp32.producer(lambda tensor: id(tensor) in flawed)
    found = found_backward(made, None, parameter, wide_made, finite_in_fp32=not flawed)
    return with_all_names(found, again.inspector, wide.inspector, in_fp32)


def finest_scale(scale: float, finite_at: Callable[[float], bool]) -> float:
    """Return the highest scale, by halving, at which gradients are finite.

    Args:
        scale: One at which they are not; at 1.0 they are.
        finite_at: Tells whether they are at ``scale`` times a factor.
    """
    low, high = 0, max(1, math.ceil(math.log2(scale)))
    # The least number of halvings that does; `high` does.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finite_at(2.0**-middle) else (middle, high)
    return max(scale * 2.0**-high, 1.0)


def found_backward(
    made: Any, search: ScaleSearch | None, parameter: str, in_fp32: Any = None, *, finite_in_fp32: bool = True
) -> Overflow:
    """Return the finding for gradients that are not finite.

    Args:
        made: The call, and what its node got and gave, that made inf or nan of finite gradients; None if unknown.
        search: The verdict where a lower scale does.
        parameter: The first parameter whose gradient is not finite.
        in_fp32: As ``made``, in fp32.
        finite_in_fp32: Whether gradients are finite in fp32.
    """
    if not finite_in_fp32 and in_fp32 is not None:
        made = in_fp32
    if made is None:
        unknown = NotLocated("gradients are not finite, and no op was seen to make that of finite ones")
        return Overflow(search or unknown, phase="backward", parameter=parameter)
    site, result = made
    verdict: OverflowVerdict = search or NotFiniteInFp32(magnitudes=result.magnitudes)
    if search is None and finite_in_fp32:
        verdict = HalfPrecisionOp(result.magnitudes, _dtype_name(site), in_cast=site.in_cast)
    return replace(of_site(site, verdict, "backward", result.flaw), parameter=parameter)


def with_all_names(found: Overflow, half: Inspector, wide: Inspector, in_fp32: Backward | None) -> Overflow:
    """Return a finding of the backward pass whose entry names all ops that are to be in fp32 for it to be avoided.

    The gradient that overflows may be too large for the results of ops before as well: these have it in their dtype.

    Args:
        found: The finding.
        half, wide: What looked on in half precision, and in fp32.
        in_fp32: What looked on at the backward pass in fp32, at a loss scale of 1; None where nothing did.
    """
    if not isinstance(found.verdict, HalfPrecisionOp) or in_fp32 is None or not found.fp32_names:
        return found
    halves = {_place(site) for site in half.sites.values() if site.dtype in HALF_DTYPES and not site.in_cast}
    limit = torch.finfo(getattr(torch, found.verdict.dtype)).max
    names = list(found.fp32_names)
    too_large = [node for node, result in in_fp32.results.items() if max(result.magnitudes, default=0.0) > limit]
    for node in too_large:
        site = in_fp32.sites[node]
        names += site.names if _place(site) in halves else ()
    all_names = tuple(dict.fromkeys(names))
    suggestion = fp32_entry(all_names)
    casts = [line for node, line in wide.narrowed if node in too_large]
    if casts:
        suggestion = f"{suggestion}, and make no half tensor at {_shown(casts[0])}, whose gradient is as large"
    return replace(found, suggestion=suggestion, fp32_names=all_names)


def _place(site: Site) -> tuple[str, str | None, str | None]:
    return site.op, site.module, site.location


def _dtype_name(site: Site) -> str:
    return str(site.dtype if site.dtype in HALF_DTYPES else torch.float16).removeprefix("torch.")


# -- the loss --


def in_loss(region: LossRegion, scale: float) -> Overflow | None:
    """Return the finding for a loss whose computation, after the modules, made inf or nan; None where it did not.

    Its ops are known by the nodes of the graph, and their lines as far as torch noted them; else it is the line that
    scaled the loss.
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
        why = "the loss is not finite, and which of its ops made that is not known; use explain_overflow()"
        return Overflow(NotLocated(why), location=_shown(region.line), phase="forward", value=in_the_loss.value)
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


_NOT_KNOWN_IN_FP32 = "whether it would be finite in fp32 is not known; use explain_overflow()"


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
    names = spellings(op) if isinstance(verdict, HalfPrecisionOp) else ()
    suggestion = fp32_entry(names)
    if isinstance(verdict, HalfPrecisionOp) and not names:
        suggestion = "make the loss smaller, or let what makes the half tensor run in fp32: its gradient is too large"
    if isinstance(verdict, NotFiniteInFp32):
        suggestion = "look at the loss: compute it in a form that stays finite"
    location = _shown(trace.line or region.line)
    return Overflow(
        verdict, op=op, location=location, phase=phase, suggestion=suggestion, value=flaw.value, fp32_names=names
    )


# What a node is called, where that is not the name of its op.
_NODE_OPS = {"ToCopy": "to", "NllLoss": "nll_loss", "NllLoss2D": "nll_loss", "Expand": "expand"}


def _op_of(name: str) -> str:
    """Return the bare name of the op that made a node: ``mse_loss`` for ``MseLossBackward0``."""
    stem = name.partition("::")[2] or name
    stem = stem.partition("Backward")[0]
    if stem in _NODE_OPS:
        return _NODE_OPS[stem]
    letters = "".join(f"_{one.lower()}" if one.isupper() else one for one in stem)
    return letters.strip("_")
