"""What is found where the calls of a step run again: which op made inf or nan, and whether fp32 cures it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.diagnostics.inspector import Origin, nonfinite_value
from autoamp.diagnostics.op_names import fp32_entry
from autoamp.diagnostics.op_watch import OpWatch
from autoamp.diagnostics.records import Record, RecordedStep
from autoamp.diagnostics.replay import CannotReplay, RecordedCall, Trial
from autoamp.diagnostics.verdicts import (
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.tensors import HALF_DTYPES

__all__ = ["first_cause", "unlocated"]


def first_cause(records: Sequence[Record], step: RecordedStep, casts: Casts, scale: float) -> Overflow | None:
    """Run the calls of a step again, and return what made inf or nan; None if all gradients are finite.

    Args:
        records: The calls, in their order.
        step: The losses, and the ops outside of the calls if they were watched.
        casts: How threads cast.
        scale: The loss scale.

    Raises:
        CannotReplay: A call that gradients came back to cannot run again.
    """
    found = None if step.ops is None else step.ops.finding()
    if found is not None and isinstance(found.verdict, ScaleSearch):
        return found
    # Findings that are harmless as a rule, by the number of the call.
    suspects: dict[int, Overflow] = {}
    in_backward = None
    for record in records:
        try:
            call = RecordedCall(record, casts, scale)
        except (CannotReplay, RuntimeError):
            if record.passes:
                raise
            continue
        if (in_forward := _forward_finding(call)) is not None:
            return _before_data(record, in_forward, suspects, step.ops)
        if (suspect := _suspect_finding(call)) is not None:
            suspects[record.number] = _before_data(record, suspect, suspects, step.ops)
        if (gradient := _gradient_finding(call)) is not None:
            # The backward pass of the last call ran first.
            in_backward = _before_data(record, gradient, suspects, step.ops)
    if found is None and nonfinite_value(*step.losses):
        found = unlocated("the loss is inf or nan, and its ops were not watched in this step")
    found = found or in_backward
    if found is None or found.phase == "forward":
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


def _forward_finding(call: RecordedCall) -> Overflow | None:
    """Return the finding for an output that holds inf or nan and spoils the gradients; None if none does."""
    outputs = [number for number in _nonfinite_outputs(call) if call.record.has_gradient(number)]
    return None if not outputs or _is_finite_at_one(call) else _first_finding(call, outputs, intended=False)


def _suspect_finding(call: RecordedCall) -> Overflow | None:
    """Return the finding for an output that is harmless as a rule: without gradients, or -inf maybe on purpose."""
    outputs = [
        number
        for number in _nonfinite_outputs(call)
        if call.record.has_gradient(number) or not getattr(call.half.outputs[number], "requires_grad", True)
    ]
    return _first_finding(call, outputs, intended=True)


def _gradient_finding(call: RecordedCall) -> Overflow | None:
    """Return the finding for gradients that hold inf or nan; None if all are finite."""
    if call.record.too_large:
        return unlocated("the gradients at the outputs are too large to keep; use explain_overflow()")
    for loss in call.record.passes:
        arrived = call.record.gradients_of(loss)
        value = nonfinite_value(*arrived)
        try:
            found = _backward_finding(call, loss) if value is None else _loss_finding(call, arrived, value)
        except CannotReplay as error:
            found = unlocated(str(error))
        if found is not None:
            return found
    return None


def _loss_finding(call: RecordedCall, arrived: Sequence[Tensor | None], value: str) -> Overflow:
    """Return the finding for gradients that hold inf or nan as they come from the loss to a call."""
    wide = [one for one in arrived if one is not None and one.dtype not in HALF_DTYPES]
    if call.scale > 1.0 and value == "inf" and not nonfinite_value(*wide):
        # No half tensor can hold it. If a lower scale does not help, the next step tells.
        return Overflow(ScaleSearch(), phase="backward")
    return unlocated(
        f"the gradients hold {value} where they come to {type(call.record.module()).__name__}, and the ops between its "
        "call and the loss were not watched in this step"
    )


def _nonfinite_outputs(call: RecordedCall) -> list[int]:
    return [number for number, one in enumerate(call.half.outputs) if nonfinite_value(one)]


def _is_finite_at_one(call: RecordedCall) -> bool:
    """Tell whether all gradients are finite at a loss scale of 1: no inf of the forward pass is to blame then."""
    return call.scale > 1.0 and not any(
        nonfinite_value(*call.record.gradients_of(loss)) or call.nonfinite_at(1.0, loss) for loss in call.record.passes
    )


def _first_finding(call: RecordedCall, outputs: list[int], *, intended: bool) -> Overflow | None:
    """Return the first finding for outputs that hold inf or nan.

    Args:
        call: The call.
        outputs: The numbers of the outputs.
        intended: Whether to blame a -inf too that may have been written on purpose.
    """
    for number in outputs:
        origin = _origin_of(call.half, number, intended)
        if origin is None:
            continue
        if origin.site is None:
            return _given_finding(origin, call.half)
        try:
            wide = call.wide
        except (CannotReplay, RuntimeError) as error:
            return origin.site.finding(_unknown_in_fp32(error), "forward", origin.value)
        return _origin_finding(origin, _origin_of(wide, number, intended), wide)
    return None


def _origin_of(trial: Trial, number: int, intended: bool) -> Origin | None:
    output = trial.outputs[number] if number < len(trial.outputs) else None
    if output is None or not nonfinite_value(output):
        return None
    origin = trial.inspector.origin_of(output)
    return None if origin.intended and not intended else origin


def _backward_finding(call: RecordedCall, loss: int) -> Overflow | None:
    """Return the finding for gradients of a loss that hold inf or nan, though those at the outputs do not.

    Lower loss scales are tried, and fp32.
    """
    leaves = call.nonfinite_at(call.scale, loss)
    if not leaves:
        return None
    parameter = next((name for name in leaves if not name.startswith("input ")), next(iter(leaves)))
    return replace(_cause_of_gradients(call, loss), parameter=parameter)


def _cause_of_gradients(call: RecordedCall, loss: int) -> Overflow:
    made = call.half.gradient_origin()
    if call.scale > 1.0 and not call.nonfinite_at(1.0, loss):
        return _gradient_overflow(made, ScaleSearch(_highest_finite_scale(call, loss)))
    source = None if made is None or made.site is None else made.site.source
    source = None if source is None or source.intended else source
    if source is not None and source.site is None:
        return _given_finding(source, call.half)
    try:
        wide = call.wide
        finite_in_fp32 = not call.nonfinite_at(1.0, loss, wide)
    except (CannotReplay, RuntimeError) as error:
        return _gradient_overflow(made, _unknown_in_fp32(error))
    if source is not None:
        # The forward pass made it, though the outputs do not show it.
        origins = [] if finite_in_fp32 else [one for one in wide.inspector.origins if not one.intended]
        return _origin_finding(source, origins[0] if origins else None, wide)
    if not finite_in_fp32:
        made = wide.gradient_origin() or made
    if made is None or made.site is None:
        why = "gradients have inf or nan, and no recorded op made them from finite values"
        return _gradient_overflow(None, NotLocated(why))
    if not finite_in_fp32:
        return _gradient_overflow(made, NotFiniteInFp32(magnitudes=made.magnitudes))
    verdict = HalfPrecisionOp(made.magnitudes, made.site.half_name, made.site.in_cast)
    found = _gradient_overflow(made, verdict)
    return _with_all_names(found, call) if found.fp32_names else found


def _highest_finite_scale(call: RecordedCall, loss: int) -> float:
    """Halve the loss scale until gradients are finite. At 1.0 they are."""
    scale = call.scale / 2
    while scale > 1.0 and call.nonfinite_at(scale, loss):
        scale /= 2
    return max(scale, 1.0)


def _unknown_in_fp32(why: object) -> NotLocated:
    return NotLocated(f"it is not known whether fp32 would be finite: {why}")


def _origin_finding(origin: Origin, in_fp32: Origin | None, wide: Trial) -> Overflow:
    """Return the finding for an inf or nan of the forward pass, by its origin in half precision and in fp32."""
    assert origin.site is not None
    if in_fp32 is not None and in_fp32.site is not None and in_fp32.site.dtype in HALF_DTYPES:
        if in_fp32.site.place == origin.site.place:
            why = _unknown_in_fp32("it writes to a half tensor in place")
            return origin.site.finding(why, "forward", origin.value)
        # In fp32 it was finite until it was written to a tensor that the program made half.
        in_fp32 = None
    if in_fp32 is None:
        verdict = HalfPrecisionOp(origin.magnitudes, origin.site.half_name, origin.site.in_cast)
        return origin.site.finding(verdict, "forward", origin.value)
    if in_fp32.site is None:
        return _given_finding(in_fp32, wide)
    return in_fp32.site.finding(NotFiniteInFp32(magnitudes=in_fp32.magnitudes), "forward", in_fp32.value)


def _given_finding(origin: Origin, trial: Trial) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    given, root = origin.tensor, trial.inspector.root
    assert given is not None
    assert root is not None
    model = type(root).__name__
    held = Overflow(NotLocated(), module=model, phase="forward", value=origin.value)
    for name, tensor in trial.inspector.inputs:
        if _is(tensor, given):
            data = NotFiniteInFp32(cause="data", tensor=name, batch_index=_batch_index(tensor))
            return replace(held, verdict=data, suggestion="look at the data of this batch")
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if _is(tensor, given):
            advice = "load an earlier checkpoint, or initialize it again"
            weight = NotFiniteInFp32(cause="weights", tensor=name)
            return replace(held, verdict=weight, module=name.rpartition(".")[0] or model, suggestion=advice)
    why = "it comes from code that is not recorded, such as TorchScript, torch.func, numpy or another library"
    return replace(held, verdict=NotLocated(why), module=None)


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def _batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor holds inf or nan; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = ~tensor.detach().isfinite()
    return int(bad.reshape(len(bad), -1).any(1).nonzero()[0])


def _gradient_overflow(made: Origin | None, verdict: OverflowVerdict) -> Overflow:
    """Return the finding for gradients, by the call whose node made inf or nan of finite ones, if it is known."""
    if made is None or made.site is None:
        return Overflow(verdict, phase="backward")
    return made.site.finding(verdict, "backward", made.value)


def _with_all_names(found: Overflow, call: RecordedCall) -> Overflow:
    """Return a finding of the backward pass whose entry names all ops that must be in fp32 to avoid it.

    The gradient that overflows may be too large for the results of earlier ops as well: it has their dtype.
    """
    assert isinstance(found.verdict, HalfPrecisionOp)
    sites = call.half.inspector.sites.values()
    halves = {site.place for site in sites if site.dtype in HALF_DTYPES and not site.in_cast}
    limit = torch.finfo(getattr(torch, found.verdict.dtype)).max
    too_large = [node for node, one in call.wide.watch.results.items() if max(one.magnitudes, default=0.0) > limit]
    named = [site.names for node in too_large if (site := call.wide.inspector.sites[node]).place in halves]
    names = tuple(dict.fromkeys(itertools.chain(found.fp32_names, *named)))
    suggestion = fp32_entry(names)
    casts = [line for node, line in call.wide.inspector.narrowed if node in too_large]
    if casts:
        suggestion = f"{suggestion}, and make no half tensor at {casts[0]}, whose gradient is as large"
    return replace(found, suggestion=suggestion, fp32_names=names)
