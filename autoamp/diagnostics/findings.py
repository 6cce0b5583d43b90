"""What a tape of a step tells: which op made inf or nan, and whether fp32 cures it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.op_names import CASTS, fp32_entry
from autoamp.diagnostics.origins import Followed, Origin, bare_op
from autoamp.diagnostics.step_recorder import RecordedStep, unwrapped
from autoamp.diagnostics.verdicts import (
    Communication,
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.tape import CannotRerun, Op, Place, Ref, Tape, everything, iter_refs
from autoamp.tensors import HALF_DTYPES, dtype_name

__all__ = ["Evidence", "Named", "explain_evidence", "half_precision_finding", "named_tensors", "unlocated"]

_MAX_SCALE_BITS = 40
# So many entries are tried.
_MAX_TRIALS = 4
# All lists have these in half precision.
_PRODUCTS = re.compile(r"mm|conv|dot|mv|lstm|gru|rnn|attention|linear")


@dataclass(frozen=True)
class Named:
    """A tensor of a step that has a name.

    Attributes:
        kind: ``"input"``, ``"weight"``, ``"grad"`` or ``"loss"``.
        name: That of the argument of ``forward``, or of the parameter or buffer.
        model: The class of the model.
        ref: What the tape calls it.
        has_grad: Whether an input requires gradients: as a rule an op computed it.
    """

    kind: str
    name: str
    model: str
    ref: Ref
    has_grad: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a verdict is found by, also on another machine.

    Attributes:
        tape: The step.
        named: Its tensors that have names.
        scale: The loss scale.
        half_dtype: That of the handle.
    """

    tape: Tape
    named: tuple[Named, ...]
    scale: float
    half_dtype: torch.dtype

    def follow(self, in_fp32: Callable[[Op], bool] = lambda op: False, **options: Any) -> Followed:
        """Run the tape again; the options are those of `Followed`."""
        inputs = frozenset(one.ref.memory for one in self.named if one.kind == "input")
        return Followed(self.tape, in_fp32, inputs=inputs, **options)


def unlocated(why: str) -> Overflow:
    """Return the finding for a cause that was not found."""
    return Overflow(NotLocated(why))


def named_tensors(step: RecordedStep, tape: Tape) -> tuple[Named, ...]:
    """Return the tensors of a step that have names."""
    found = [Named("loss", "loss", "", ref) for ref in step.loss_refs if ref is not None]
    for call in step.calls:
        root = unwrapped(call.module)
        model = type(root).__name__
        inputs = [(name, tensor, "input") for name, tensor in call.inputs()]
        weights = [(name, tensor, "weight") for name, tensor in (*root.named_parameters(), *root.named_buffers())]
        grads = [(name, step.grads.get(one, one.grad), "grad") for name, one in root.named_parameters()]
        for name, tensor, kind in inputs + weights + grads:
            # Sparse ones have no memory.
            if tensor is not None and tensor.layout is torch.strided and (ref := tape.find(tensor)) is not None:
                found.append(Named(kind, name, model, ref, kind == "input" and tensor.requires_grad))
    return tuple(dict.fromkeys(found))


def explain_evidence(step: Evidence) -> Overflow:
    """Run a step again, and return what made inf or nan."""
    try:
        return _first_cause(step) or unlocated("run again, the step gave finite gradients")
    except CannotRerun as error:
        return unlocated(str(error))


def _first_cause(step: Evidence) -> Overflow | None:
    """Run a step again, and return what made inf or nan; None if all gradients are finite.

    Raises:
        CannotRerun: The step cannot run again.
    """
    half = step.follow()
    origins = _causes(step, half)
    if not origins:
        return _outside_finding(step, half)
    if step.scale > 1.0:
        at_one = step.follow(factor=1.0 / step.scale)
        lower = _causes(step, at_one)
        if not lower:
            search = ScaleSearch(_highest_finite_scale(step))
            return _finding(origins[0], search) if origins[0].op is not None else Overflow(search, phase="backward")
        half, origins = at_one, lower
    found = _cause(step, half, origins[0])
    if found.phase == "backward":
        found = replace(found, parameter=_parameter(step, half))
    return found


def _causes(step: Evidence, run: Followed) -> list[Origin]:
    """Return the origins of what the loss or the gradients hold, the first one first."""
    losses = [origin for one in step.named if one.kind == "loss" and (origin := run.origin_of(one.ref)) is not None]
    found = list(dict.fromkeys([*losses, *run.at_gradients]))
    # What was written on purpose is blamed if it comes to the loss, or if nothing else is.
    outside = _is_reduced(step), _is_old_gradient(step)
    found = [origin for origin in found if origin.op is not None or not any(test(origin) for test in outside)]
    return sorted(found, key=lambda origin: (origin.intended and origin not in losses, origin.number))


def _is_reduced(step: Evidence) -> Callable[[Origin], bool]:
    """Return what tells whether inf or nan came out of a reduction over ranks."""
    collectives = [op for op in step.tape.ops if op.is_recorded and op.func.namespace != "aten"]
    memories = {ref.memory for op in collectives for ref in iter_refs((op.args, op.kwargs, op.outputs))}
    return lambda origin: origin.ref.memory in memories


def _is_old_gradient(step: Evidence) -> Callable[[Origin], bool]:
    """Return what tells whether inf or nan is of an earlier step, whose gradients were not set to zero."""
    memories = {one.ref.memory for one in step.named if one.kind == "grad"}
    return lambda origin: origin.ref.memory in memories


def _outside_finding(step: Evidence, run: Followed) -> Overflow | None:
    """Return the finding for inf or nan in gradients that nothing in this step made."""
    if any(map(_is_reduced(step), run.at_gradients)):
        advice = "trace overflows on all ranks, and look at what the other ranks log"
        return Overflow(Communication(), suggestion=advice)
    if any(map(_is_old_gradient(step), run.at_gradients)):
        return unlocated("gradients that were not set to zero held inf or nan before the step")
    return None


def _cause(step: Evidence, half: Followed, origin: Origin) -> Overflow:
    """Return the finding for an origin, by the same step in fp32."""
    if origin.op is None:
        return _given_finding(step, half, origin)
    limit = torch.finfo(_half_dtype(step, origin)).max
    try:
        wide = step.follow(everything, factor=1.0 / max(step.scale, 1.0), limit=limit)
    except CannotRerun as error:
        return _in_unknown_precision(origin, str(error))
    in_fp32 = _causes(step, wide)
    if not in_fp32:
        return _proven(step, origin, half_precision_finding(step, origin, wide))
    first = in_fp32[0]
    if first.op is None:
        return _given_finding(step, wide, first)
    if any(first.op is op for op in wide.rerun.left_half):
        return _in_unknown_precision(origin, "torch has no fp32 kernel for it")
    advice = "compute it in a form that stays finite, or look at the data and the learning rate"
    return replace(_finding(first, NotFiniteInFp32(magnitudes=first.magnitudes)), suggestion=advice)


def _finding(origin: Origin, verdict: OverflowVerdict) -> Overflow:
    assert origin.op is not None
    place, phase = origin.place, "backward" if origin.op.phase == "backward" else "forward"
    op = place.function or bare_op(origin.op)
    return Overflow(
        verdict, op=op, module=place.module, location=place.location, phase=phase, value=origin.value
    )  # fmt: skip


def _in_unknown_precision(origin: Origin, why: str) -> Overflow:
    return _finding(origin, NotLocated(f"it is not known whether fp32 would be finite: {why}"))


def _half_dtype(step: Evidence, origin: Origin) -> torch.dtype:
    return origin.ref.dtype if origin.ref.dtype in HALF_DTYPES else step.half_dtype


def half_precision_finding(step: Evidence, origin: Origin, wide: Followed) -> Overflow:
    """Return the finding for an op that is finite in fp32."""
    assert origin.op is not None
    is_backward = origin.op.phase == "backward"
    in_cast = origin.op.place.is_cast or origin.place.function in CASTS
    verdict = HalfPrecisionOp(origin.magnitudes, dtype_name(_half_dtype(step, origin)), in_cast)
    names = origin.place.names
    advice = "compute it in fp32, or make its values smaller"
    casts: list[str] = []
    if is_backward:
        advice = "its gradient is too large: make the loss smaller, or run the op that makes it in fp32"
        if names:
            # The gradient may be too large for the results of earlier ops as well: it has their dtype.
            places = [op.place for op in wide.too_large if not op.place.is_cast]
            names = tuple(dict.fromkeys((*names, *(name for place in places for name in place.names))))
            casts = [str(place.location) for place in places if place.function in CASTS]
    entry = fp32_entry(names, origin.place.in_place)
    if entry is not None and casts:
        entry = f"{entry}, and make no half tensor at {casts[0]}, whose gradient is as large"
    return replace(_finding(origin, verdict), suggestion=entry or advice, fp32_names=names)


# -- entries that are tried on the tape --


def _proven(step: Evidence, origin: Origin, found: Overflow) -> Overflow:
    """Return a finding whose entry was tried, if there is one that makes the step finite."""
    assert origin.op is not None
    if not found.fp32_names:
        return found
    if origin.op.place.is_cast or _is_half(origin.op):
        is_proven = _is_finite_with(step, found.fp32_names)
        return replace(found, suggestion=_tried(found.suggestion)) if is_proven else found
    # The op is in fp32 already: what it gets was rounded to half.
    names: tuple[str, ...] = ()
    for op in itertools.islice(_half_ops_before(step.tape, origin.op), _MAX_TRIALS):
        names = tuple(dict.fromkeys((*names, *op.place.names)))
        if _is_finite_with(step, names):
            return replace(found, suggestion=_tried(fp32_entry(names)), fp32_names=names)
    advice = "compute in fp32 what it gets; no entry was found that makes the step finite"
    return replace(found, suggestion=advice, fp32_names=())


def _tried(suggestion: str | None) -> str:
    return str(suggestion).replace("to the list file", "to the list file (tried)")


def _is_half(op: Op) -> bool:
    return any(ref.dtype in HALF_DTYPES for ref in iter_refs((op.args, op.kwargs, op.outputs)))


def _half_ops_before(tape: Tape, op: Op) -> Iterator[Op]:
    """Yield the ops in half precision that an op's arguments were computed by, the last ones first."""
    ops = list(tape.ops)
    wanted = {ref.memory for ref in iter_refs((op.args, op.kwargs))}
    for earlier in reversed(ops[: ops.index(op)]):
        if not wanted.isdisjoint(ref.memory for ref in iter_refs(earlier.outputs)):
            wanted.update(ref.memory for ref in iter_refs((earlier.args, earlier.kwargs)))
            if earlier.place.names and _is_half(earlier):
                yield earlier


def _is_finite_with(step: Evidence, names: tuple[str, ...]) -> bool:
    """Whether the step is finite with all functions of these names in fp32, as an entry of a list makes them.

    What gets their fp32 results computes in fp32 too, but for products and for what else half copies were made for.
    """
    casts: dict[int, Place] = {}
    chosen: set[Place] = set()
    wide: set[int] = set()
    # Operators of a backward pass have the places of those of the forward pass.
    for op in (op for op in step.tape.ops if op.phase != "backward"):
        feeding = {casts[ref.memory] for ref in iter_refs((op.args, op.kwargs)) if ref.memory in casts}
        is_half = any(ref.dtype in HALF_DTYPES for ref in iter_refs(op.outputs))
        is_promoted = any(ref.memory in wide for ref in iter_refs((op.args, op.kwargs)))
        if op.place.is_cast:
            casts.update({ref.memory: op.place for ref in iter_refs(op.outputs)})
            # A cast to fp32 of what is fp32 by the entry, whose gradient is then fp32 too.
            chosen |= {op.place} if is_promoted and not is_half else set()
        elif not set(names).isdisjoint(op.place.names):
            chosen |= {op.place, *feeding}
            wide.update(ref.memory for ref in iter_refs(op.outputs))
        elif is_promoted and not (is_half and (feeding or op.place.function in CASTS or _PRODUCTS.search(op.name))):
            chosen.add(op.place)
            wide.update(ref.memory for ref in iter_refs(op.outputs))
    return not _causes(step, step.follow(lambda op: op.place in chosen, factor=1.0 / max(step.scale, 1.0)))


def _given_finding(step: Evidence, run: Followed, origin: Origin) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    memory = origin.ref.memory
    held = Overflow(NotLocated(), phase="forward", value=origin.value)
    for one in step.named:
        if one.ref.memory != memory or one.kind not in ("input", "weight"):
            continue
        held = replace(held, module=one.model)
        if one.kind == "weight":
            advice = "load an earlier checkpoint, or initialize it again"
            weight, module = NotFiniteInFp32(cause="weights", tensor=one.name), one.name.rpartition(".")[0] or one.model
            return replace(held, verdict=weight, module=module, suggestion=advice)
        if one.has_grad:
            # As a rule another op computed it, so it is not called data.
            return unlocated(
                f"the input {one.name} of {one.model} holds {origin.value} already, and the op that made it was not "
                "recorded"
            )
        data = NotFiniteInFp32(cause="data", tensor=one.name, batch_index=_batch_index(run.rerun.value(one.ref)))
        return replace(held, verdict=data, suggestion="look at the data of this batch")
    why = "it comes from code that is not recorded, such as TorchScript, torch.func, numpy or another library"
    return replace(held, verdict=NotLocated(why), module=None)


def _batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor holds inf or nan; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()
    return int(bad[0]) if len(bad) else None


def _parameter(step: Evidence, run: Followed) -> str | None:
    """Return the first parameter whose gradient was computed of inf or nan."""
    return next((one.name for one in step.named if one.kind == "grad" and run.is_tainted(one.ref)), None)


def _highest_finite_scale(step: Evidence) -> float:
    """Return the highest power of two times the scale, below it, at which gradients are finite. At 1.0 they are."""
    finite = 1.0
    low, high = 1, _MAX_SCALE_BITS
    while low <= high:
        middle = (low + high) // 2
        scale = step.scale * 2.0**-middle
        if scale <= 1.0:
            high = middle - 1
        elif _causes(step, step.follow(factor=scale / step.scale)):
            low = middle + 1
        else:
            finite, high = max(finite, scale), middle - 1
    return finite
