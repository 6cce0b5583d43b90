"""What is found where the calls of a step run again: which op made inf or nan, and whether fp32 cures it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import OpWatch, Origin, have_same_memory, nonfinite_value
from autoamp.diagnostics.op_names import fp32_entry
from autoamp.diagnostics.records import Record, RecordedStep
from autoamp.diagnostics.replay import CannotReplay, Replay
from autoamp.diagnostics.verdicts import HalfPrecisionOp, NotFiniteInFp32, NotLocated, Overflow, ScaleSearch
from autoamp.tensors import HALF_DTYPES, iter_tensors

__all__ = ["first_cause", "unlocated"]


def first_cause(step: RecordedStep, casts: Casts, scale: float) -> Overflow | None:
    """Run the calls of a step again, and return what made inf or nan; None if all gradients are finite.

    Args:
        step: The calls, the losses, and the ops outside of the calls if they were watched.
        casts: How threads cast.
        scale: The loss scale.

    Raises:
        CannotReplay: A call that gradients came back to cannot run again.
    """
    found = None if step.ops is None else step.ops.finding()
    if found is not None and isinstance(found.verdict, ScaleSearch):
        return found
    if any(scale > torch.finfo(loss.dtype).max for loss in step.losses) and not nonfinite_value(*step.losses):
        # The backward pass begins with the scale, which the dtype of a half loss cannot hold.
        return Overflow(ScaleSearch(), phase="backward")
    # Findings that are harmless as a rule, by the number of the call.
    suspects: dict[int, Overflow] = {}
    in_backward = None
    for record in step.records:
        try:
            call = Replay(record, casts, scale)
        except (CannotReplay, RuntimeError):
            if record.is_reached:
                raise
            continue
        if (in_forward := _output_finding(call)) is not None and not _is_finite_at_one(call):
            return _before_data(record, in_forward, suspects, step.ops)
        if (suspect := _output_finding(call, harmless=True)) is not None:
            suspects[record.number] = _before_data(record, suspect, suspects, step.ops)
        if (gradient := _gradient_finding(call)) is not None:
            # The backward pass of the last call ran first.
            in_backward = _before_data(record, gradient, suspects, step.ops)
    if found is None and nonfinite_value(*step.losses):
        found = unlocated("the loss is inf or nan, and its ops were not watched in this step")
    found = found or in_backward
    if found is None or found.phase == "forward":
        # The loss is inf or nan because of such a call, if there is one: the call ran before the loss.
        return next(iter(suspects.values()), found)
    return found


def unlocated(why: str) -> Overflow:
    """Return the finding for a cause that was not found."""
    return Overflow(NotLocated(why))


def _before_data(record: Record, found: Overflow, suspects: Mapping[int, Overflow], ops: OpWatch | None) -> Overflow:
    """Return a finding, or if inf or nan came in by an input, that of the op or call which computed the input."""
    if not isinstance(found.verdict, NotFiniteInFp32) or found.verdict.cause != "data":
        return found
    inputs = [tensor for tensor, _ in record.versions if nonfinite_value(tensor)]
    between = [] if ops is None else [one for tensor in inputs if (one := ops.finding_of(tensor)) is not None]
    earlier = [one for number, one in suspects.items() if number < record.number]
    if between or earlier or not any(tensor.requires_grad for tensor in inputs):
        return next(iter((*between, *earlier)), found)
    # A gradient goes back to it: as a rule another op computed it, so it is not called data.
    return unlocated(
        f"the input {found.verdict.tensor} of {found.module} holds {found.value} already, and the op that made it "
        "was not recorded"
    )


# -- the forward pass of a call --


def _output_finding(call: Replay, *, harmless: bool = False) -> Overflow | None:
    """Return the finding for the first output that holds inf or nan; None if none does.

    Args:
        call: The call.
        harmless: Whether to blame what is harmless as a rule: an output without a gradient, and a -inf that may have
            been written on purpose.
    """
    for number, output in enumerate(call.outputs):
        is_reached = number in call.record.gradients
        if output is None or not (is_reached or (harmless and not output.requires_grad)):
            continue
        origin = _origin_of(call, number, harmless)
        if origin is None:
            continue
        if origin.site is None:
            return _given_finding(origin, call)
        try:
            return _forward_cause(origin, _origin_of(call.in_fp32, number, harmless), call.in_fp32)
        except (CannotReplay, RuntimeError) as error:
            return origin.in_unknown_precision("forward", error)
    return None


def _origin_of(call: Replay, number: int, intended: bool) -> Origin | None:
    """Return where the inf or nan of an output came from; None if it holds none, or one that may be intended."""
    output = call.outputs[number]
    if output is None or not nonfinite_value(output):
        return None
    origin = call.inspector.origin_of(output)
    return None if origin.intended and not intended else origin


def _is_finite_at_one(call: Replay) -> bool:
    """Tell whether all gradients are finite at a loss scale of 1: no inf of the forward pass is to blame then."""
    return call.scale > 1.0 and not nonfinite_value(*iter_tensors(call.record.gradients)) and not call.backward(1.0)


def _forward_cause(origin: Origin, in_fp32: Origin | None, wide: Replay) -> Overflow:
    """Return the finding for an inf or nan of the forward pass, by its origin in half precision and in fp32."""
    assert origin.site is not None
    if in_fp32 is not None and in_fp32.site is not None and in_fp32.site.dtype in HALF_DTYPES:
        if in_fp32.site.place == origin.site.place:
            return origin.in_unknown_precision("forward", "it writes to a half tensor in place")
        # In fp32 it was finite until it was written to a tensor that the program made half.
        in_fp32 = None
    if in_fp32 is None:
        return origin.in_half_precision("forward", wide.half_dtype)
    return _given_finding(in_fp32, wide) if in_fp32.site is None else in_fp32.in_fp32("forward")


def _given_finding(origin: Origin, call: Replay) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    given, root = origin.tensor, call.root
    assert given is not None
    held = Overflow(NotLocated(), module=type(root).__name__, phase="forward", value=origin.value)
    for name, tensor in call.inspector.inputs:
        if have_same_memory(tensor, given):
            data = NotFiniteInFp32(cause="data", tensor=name, batch_index=_batch_index(tensor))
            return replace(held, verdict=data, suggestion="look at the data of this batch")
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if have_same_memory(tensor, given):
            advice = "load an earlier checkpoint, or initialize it again"
            weight, module = NotFiniteInFp32(cause="weights", tensor=name), name.rpartition(".")[0] or held.module
            return replace(held, verdict=weight, module=module, suggestion=advice)
    why = "it comes from code that is not recorded, such as TorchScript, torch.func, numpy or another library"
    return replace(held, verdict=NotLocated(why), module=None)


def _batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor holds inf or nan; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = ~tensor.detach().isfinite()
    return int(bad.reshape(len(bad), -1).any(1).nonzero()[0])


# -- the backward pass of a call --


def _gradient_finding(call: Replay) -> Overflow | None:
    """Return the finding for gradients that hold inf or nan; None if all are finite."""
    if call.record.too_large:
        return unlocated("the gradients at the outputs are too large to keep; use explain_overflow()")
    value = nonfinite_value(*iter_tensors(call.record.gradients))
    if value is not None:
        return _loss_finding(call, value)
    try:
        leaves = call.backward(call.scale)
        if not leaves:
            return None
        parameter = next((name for name in leaves if not name.startswith("input ")), next(iter(leaves)))
        return replace(_gradient_cause(call), parameter=parameter)
    except CannotReplay as error:
        return unlocated(str(error))


def _loss_finding(call: Replay, value: str) -> Overflow:
    """Return the finding for gradients that hold inf or nan as they come from the loss to a call."""
    wide = [one for one in iter_tensors(call.record.gradients) if one.dtype not in HALF_DTYPES]
    if call.scale > 1.0 and value == "inf" and not nonfinite_value(*wide):
        # No half tensor can hold it. If a lower scale does not help, the next step tells.
        return Overflow(ScaleSearch(), phase="backward")
    return unlocated(
        f"the gradients hold {value} where they come to {type(call.record.module).__name__}, and the ops between its "
        "call and the loss were not watched in this step"
    )


def _gradient_cause(call: Replay) -> Overflow:
    """Return the finding for gradients that hold inf or nan, though those at the outputs do not."""
    made = call.gradient_origin()
    if call.scale > 1.0 and not call.backward(1.0):
        search = ScaleSearch(_highest_finite_scale(call))
        return Overflow(search, phase="backward") if made is None else made.finding(search, "backward")
    source = None if made is None or made.site is None else made.site.source
    source = None if source is None or source.intended else source
    if source is not None and source.site is None:
        return _given_finding(source, call)
    unknown = unlocated("gradients have inf or nan, and no recorded op made them from finite values")
    try:
        wide = call.in_fp32
        is_finite = not wide.backward(1.0)
    except (CannotReplay, RuntimeError) as error:
        return unknown if made is None else made.in_unknown_precision("backward", error)
    if source is not None:
        # The forward pass made it, though the outputs do not show it.
        origins = [] if is_finite else [one for one in wide.inspector.origins if not one.intended]
        return _forward_cause(source, origins[0] if origins else None, wide)
    if not is_finite:
        made = wide.gradient_origin() or made
    if made is None:
        return replace(unknown, phase="backward")
    if not is_finite:
        return made.in_fp32("backward")
    return _with_all_names(made.in_half_precision("backward", call.half_dtype), call)


def _highest_finite_scale(call: Replay) -> float:
    """Halve the loss scale until gradients are finite. At 1.0 they are."""
    scale = call.scale / 2
    while scale > 1.0 and call.backward(scale):
        scale /= 2
    return max(scale, 1.0)


def _with_all_names(found: Overflow, call: Replay) -> Overflow:
    """Return a finding of the backward pass whose entry names all ops that must be in fp32 to avoid it.

    The gradient that overflows may be too large for the results of earlier ops as well: it has their dtype.
    """
    assert isinstance(found.verdict, HalfPrecisionOp)
    if not found.fp32_names:
        return found
    wide = call.in_fp32
    halves = {one.place for one in call.inspector.sites.values() if one.dtype in HALF_DTYPES and not one.in_cast}
    limit = torch.finfo(getattr(torch, found.verdict.dtype)).max
    too_large = [node for node, one in wide.watch.results.items() if max(one.magnitudes, default=0.0) > limit]
    named = [site.names for node in too_large if (site := wide.inspector.sites[node]).place in halves]
    names = tuple(dict.fromkeys(itertools.chain(found.fp32_names, *named)))
    suggestion = fp32_entry(names)
    casts = [line for node, line in wide.inspector.narrowed if node in too_large]
    if casts:
        suggestion = f"{suggestion}, and make no half tensor at {casts[0]}, whose gradient is as large"
    return replace(found, suggestion=suggestion, fp32_names=names)
