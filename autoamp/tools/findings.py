"""What a tape of a step tells: which op made inf or nan, whether fp32 cures it, and by which entry of a list file.

Each entry is tried on the tape before it is suggested.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoamp.core import AUTOCAST
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.tools.call_sites import CASTS, OPERATORS
from autoamp.tools.origins import Followed, NonFiniteOrigin, bare_op, errors_of, nonfinite_value
from autoamp.tools.tape import CannotRerun, Choice, Op, Place, Rerun, Tape, everything, iter_refs
from autoamp.tools.verdicts import (
    Communication,
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)

_MAX_SCALE_BITS = 40
# Half precision alone puts gradients of deep models off by as much, as a part of those in fp32.
_CLOSE = 1 / 8
_MAX_LATER_OPS = 2
# So many ops are tried that made the inputs of an op, and so many modules around it.
_MAX_OPS, _MAX_MODULES = 4, 3
# So many ops that overflowed earlier are tried.
_MAX_EARLIER = 4
# All lists have these in half precision.
_PRODUCTS = re.compile(r"mm|conv|dot|mv|lstm|gru|rnn|attention|linear")


def unlocated(why: str) -> Overflow:
    """Return the finding for a cause that was not found."""
    return Overflow(NotLocated(why))


def by_communication() -> Overflow:
    """Return the finding for gradients that came out of a reduction over ranks with inf or nan."""
    return Overflow(Communication(), suggestion="trace overflows on all ranks, and look at what the other ranks log")


def explain_tape(tape: Tape) -> Overflow:
    """Run a step again, and return what made inf or nan."""
    try:
        return _first_cause(tape) or unlocated("run again, the step gave finite gradients")
    except CannotRerun as error:
        return unlocated(str(error))


def _first_cause(tape: Tape) -> Overflow | None:
    """Run a step again, and return what made inf or nan; None if all gradients are finite.

    Raises:
        CannotRerun: The step cannot run again.
    """
    half = Followed(tape)
    origins = _causes(half)
    if not origins:
        # Nothing in this step made it.
        held = {origin.ref.memory for origin in half.at_gradients}
        if held & _reduced(tape):
            return by_communication()
        if held & tape.of_kind("grad"):
            return unlocated("gradients that were not set to zero held inf or nan before the step")
        return None
    if tape.scale > 1.0:
        at_one = Followed(tape, factor=1.0 / tape.scale)
        lower = _causes(at_one)
        if not lower:
            search = ScaleSearch(_highest_finite_scale(tape))
            return _finding(origins[0], search) if origins[0].op is not None else Overflow(search, phase="backward")
        half, origins = at_one, lower
    found = _cause(half, origins[0])
    if found.phase == "backward":
        gradients = (one for one in tape.named if one.kind == "grad")
        found = replace(found, parameter=next((one.name for one in gradients if half.origin_of(one.ref)), None))
    return found


def _causes(run: Followed) -> list[NonFiniteOrigin]:
    """Return the origins of what the loss or the gradients hold, the first one first."""
    losses = [origin for one in run.tape.named if one.kind == "loss" and (origin := run.origin_of(one.ref)) is not None]
    found = list(dict.fromkeys([*losses, *run.at_gradients]))
    # What was written on purpose is blamed if it comes to the loss, or if nothing else is.
    outside = _reduced(run.tape) | run.tape.of_kind("grad")
    found = [origin for origin in found if origin.op is not None or origin.ref.memory not in outside]
    return sorted(found, key=lambda origin: (origin.intended and origin not in losses, origin.number))


def _reduced(tape: Tape) -> set[int]:
    """Return the memories of what was reduced over ranks."""
    collectives = [op for op in tape.ops if op.is_recorded and op.func.namespace != "aten"]
    return {ref.memory for op in collectives for ref in iter_refs((op.args, op.kwargs, op.outputs))}


def _cause(half: Followed, origin: NonFiniteOrigin) -> Overflow:
    """Return the finding for an origin, by the same step in fp32."""
    if origin.op is None:
        return _given_finding(half, origin)
    tape, limit = half.tape, torch.finfo(_half_dtype(half.tape, origin)).max
    try:
        wide = Followed(tape, everything, factor=1.0 / max(tape.scale, 1.0), limit=limit)
    except CannotRerun as error:
        return _in_unknown_precision(origin, str(error))
    in_fp32 = _causes(wide)
    if not in_fp32:
        found = half_precision_finding(origin, wide)
        return found if _has_entry(found) else next(_earlier_findings(half, origin, wide), found)
    first = in_fp32[0]
    if first.op is None:
        return _given_finding(wide, first)
    if any(first.op is op for op in wide.left_half):
        return _in_unknown_precision(origin, "torch has no fp32 kernel for it")
    advice = "compute it in a form that stays finite, or check its inputs and the learning rate"
    return replace(_finding(first, NotFiniteInFp32(magnitudes=first.magnitudes)), suggestion=advice)


def _has_entry(found: Overflow) -> bool:
    """Whether an entry of a list was found that cures an overflow."""
    return bool(found.fp32_names or found.fp32_module)


def _earlier_findings(half: Followed, origin: NonFiniteOrigin, wide: Followed) -> Iterator[Overflow]:
    """Yield the findings with an entry for what overflowed before an origin that no entry cures.

    An inf may become 0, and a division by that nan.
    """
    before = (one for one in half.origins if one.number < origin.number and one.op is not None)
    halves = (one for one in before if one.ref.dtype in HALF_DTYPES and not one.intended)
    findings = (half_precision_finding(one, wide) for one in itertools.islice(halves, _MAX_EARLIER))
    yield from filter(_has_entry, findings)


def _finding(origin: NonFiniteOrigin, verdict: OverflowVerdict) -> Overflow:
    assert origin.op is not None
    place, phase = origin.place, "backward" if origin.op.phase == "backward" else "forward"
    op = place.function or bare_op(origin.op)
    return Overflow(verdict, op, place.module, place.location, phase, value=origin.value)


def _in_unknown_precision(origin: NonFiniteOrigin, why: str) -> Overflow:
    return _finding(origin, NotLocated(f"it is not known whether fp32 would be finite: {why}"))


def _half_dtype(tape: Tape, origin: NonFiniteOrigin) -> torch.dtype:
    return origin.ref.dtype if origin.ref.dtype in HALF_DTYPES else tape.half_dtype


def half_precision_finding(origin: NonFiniteOrigin, wide: Followed) -> Overflow:
    """Return the finding for an op that is finite in fp32, with the first entry that makes the step that of fp32."""
    assert origin.op is not None
    tape = wide.tape
    in_cast = origin.op.place.is_cast or origin.place.function in CASTS
    verdict = HalfPrecisionOp(origin.magnitudes, dtype_name(_half_dtype(tape, origin)), in_cast)
    found = _finding(origin, verdict)
    names, casts = origin.place.names, []
    if origin.op.phase == "backward" and names:
        # The gradient may be too large for the results of earlier ops as well: it has their dtype.
        places = [op.place for op in wide.too_large if not op.place.is_cast]
        names = Entry(names).plus(*places).names
        casts = [str(place.location) for place in places if place.function in CASTS]
    entries = _entries_for(tape, origin.op, names)
    entry = next((one for one in entries if _heals(tape, one)), None)
    if entry is None and names and is_half(origin.op):
        entry = _with_later_ops(tape, Entry(names))
    if entry is not None:
        advice = entry.advice(origin.place.in_place and set(entry.names) >= set(names))
        return replace(found, suggestion=advice, fp32_names=entry.names, fp32_module=entry.module)
    advice = "compute it in fp32, or make its values smaller"
    if casts:
        advice = f"make no half tensor at {casts[0]}, whose gradient is too large"
    elif origin.op.phase == "backward":
        advice = "its gradient is too large: make the loss smaller, or run the op that makes it in fp32"
    return replace(found, suggestion=f"{advice}; no entry of a list was found that makes the step right")


def _with_later_ops(tape: Tape, entry: Entry) -> Entry | None:
    """Return an entry with the ops for which its results are too large; None if that is not enough."""
    for _ in range(_MAX_LATER_OPS):
        left = _causes(_run_with(tape, entry, 1.0 / max(tape.scale, 1.0)))
        if not left or left[0].op is None or not is_half(left[0].op) or set(left[0].place.names) <= set(entry.names):
            return None
        entry = entry.plus(left[0].place)
        if _heals(tape, entry):
            return entry
    return None


def _run_with(tape: Tape, entry: Entry, factor: float) -> Followed:
    return Followed(tape, in_fp32_with(tape, entry.acts_on, within=entry.module is not None), factor=factor)


def _heals(tape: Tape, entry: Entry) -> bool:
    """Whether a step is finite with an entry, and its gradients are those of fp32."""
    # Without the scale gradients may be too small.
    for factor in dict.fromkeys((1.0 / max(tape.scale, 1.0), 1.0)):
        run = _run_with(tape, entry, factor)
        if _causes(run) or not _gradients_fit(run):
            return False
        wide = Rerun(tape, everything, factor=factor).finish()
        errors = sorted(errors_of(run, wide).parameters.values())
        # The rest in half precision explains as much.
        if not errors or errors[-1] <= max(_CLOSE, 2.0 * errors[(len(errors) - 1) // 2]):
            return True
    return False


def _gradients_fit(run: Followed) -> bool:
    """Whether gradients fit into half parameters, as those of O3 are: what computes in fp32 casts them, and back."""
    halves = (one.ref for one in run.tape.named if one.kind == "grad" and one.ref.dtype in HALF_DTYPES)
    return all(nonfinite_value(run.value(ref).to(ref.dtype)) is None for ref in halves)


def _given_finding(run: Followed, origin: NonFiniteOrigin) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    memory = origin.ref.memory
    held = Overflow(NotLocated(), phase="forward", value=origin.value)
    for one in run.tape.named:
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
        data = NotFiniteInFp32(cause="data", tensor=one.name, batch_index=_batch_index(run.value(one.ref)))
        # A module of the program may have computed it, in this process or in a worker of its data loader.
        advice = (
            "look at what makes this batch before the call: its source, or code that computes it; a front end that is "
            "a module can be kept in fp32 under [modules] in the list file"
        )
        return replace(held, verdict=data, suggestion=advice)
    why = "code that is not recorded, such as TorchScript, torch.func, numpy or another library"
    if not any(one.kind == "loss" and run.origin_of(one.ref) is origin for one in run.tape.named):
        return unlocated(f"it comes from {why}")
    where = origin.place.location
    read = f" read at {where}" if where else ""
    why = f"a tensor{read} held it already: made in an earlier step, such as a running mean, or by {why}"
    return replace(held, verdict=NotLocated(why), module=None, location=where)


def _batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor holds inf or nan; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()
    return int(bad[0]) if len(bad) else None


def _highest_finite_scale(tape: Tape) -> float:
    """Return the highest power of two times the scale, below it, at which gradients are finite. At 1.0 they are."""

    def is_finite(bits: int) -> bool:
        factor = 2.0**-bits
        return tape.scale * factor <= 1.0 or not _causes(Followed(tape, factor=factor))

    bits = 1 + bisect.bisect_left(range(1, _MAX_SCALE_BITS + 1), True, key=is_finite)
    return max(1.0, tape.scale * 2.0**-bits)


# -- entries --


@dataclass(frozen=True)
class Entry:
    """An entry of a list file.

    Attributes:
        names: The functions that it keeps in fp32.
        module: The class that it keeps in fp32 under ``[modules]``, if it names no functions.
    """

    names: tuple[str, ...] = ()
    module: str | None = None

    def plus(self, *places: Place) -> Entry:
        """Return an entry that keeps in fp32 what is called at some places as well, by its names there."""
        return Entry(tuple(dict.fromkeys((*self.names, *(name for place in places for name in place.names)))))

    def acts_on(self, op: Op) -> bool:
        """Whether it acts on an op. No list acts on one without tensors, as `torch.arange`."""
        if next(iter_refs((op.args, op.kwargs)), None) is None:
            return False
        return self.module in op.place.classes or not set(self.names).isdisjoint(op.place.names)

    def advice(self, in_place: bool = False) -> str:
        """Return the sentence that suggests it, which was tried.

        Args:
            in_place: Whether the op writes to its first argument, whose dtype no list changes.
        """
        if self.module is not None:
            return f'add "{self.module}" = "fp32" under [modules] to the list file (tried)'
        entry = f"add fp32 = {json.dumps(self.names)} to the list file (tried)"
        if all(name.startswith("__") for name in self.names):
            op = next((op for op, operators in OPERATORS.items() if self.names[0] in operators), self.names[0])
            entry += f"; an entry {op!r} does not cover the operator"
        return f"write it out of place (as y = y * x for y *= x), and {entry}" if in_place else entry


def advice_without_lists(entry: Entry, casts_by: str, device_type: str) -> str:
    """Return the sentence that takes the place of an entry where the program casts by itself.

    Args:
        entry: The entry.
        casts_by: What it casts by: its `torch.autocast`, or a half model.
        device_type: The type of the devices whose tensors are cast.
    """
    what = ", ".join(entry.names) if entry.names else f"modules of class {entry.module}"
    where = f"within torch.autocast({device_type!r}, enabled=False) and " if casts_by == AUTOCAST else ""
    why = f"lists have no effect, as the program casts by itself ({casts_by})"
    return f"call {what} {where}with fp32 tensors (tried); {why}"


def is_half(op: Op) -> bool:
    """Whether an op has a result in half precision, or begins with a cast to it."""
    return op.place.is_cast or any(ref.dtype in HALF_DTYPES for ref in iter_refs(op.outputs))


def is_product(op: Op) -> bool:
    """Whether an op is one for whose speed people take half precision."""
    return _PRODUCTS.search(op.name) is not None


def half_ops_before(tape: Tape, op: Op) -> Iterator[Op]:
    """Yield the ops in half precision that an op's arguments were computed by, the last ones first."""
    ops = list(tape.ops)
    wanted = {ref.memory for ref in iter_refs((op.args, op.kwargs))}
    for earlier in reversed(ops[: ops.index(op)]):
        if not wanted.isdisjoint(ref.memory for ref in iter_refs(earlier.outputs)):
            wanted.update(ref.memory for ref in iter_refs((earlier.args, earlier.kwargs)))
            if is_half(earlier):
                yield earlier


def _entries_for(tape: Tape, op: Op, own: tuple[str, ...]) -> Iterator[Entry]:
    """Yield what could keep an op from losing values, in the order in which it is tried.

    That is the op in fp32, then the ops that made its inputs as well, then a module of the program's around it. Entries
    that are in force already are left out, and all but the first that leave no product of the step in half precision.

    Args:
        tape: The step.
        op: The op.
        own: The names of the op that an entry has.
    """
    found = []
    first = Entry(own) if is_half(op) else Entry()
    if first.names:
        yield first
    # A backward pass reads what the forward operator was given as well, as the 0 that a small epsilon was rounded to.
    forward = [one for one in tape.ops if one.phase == "forward" and one.place == op.place]
    for last in (op, *(forward[:1] if op.phase == "backward" else ())):
        before = (earlier.place for earlier in half_ops_before(tape, last) if earlier.place.names)
        entries = itertools.accumulate(itertools.islice(before, _MAX_OPS), Entry.plus, initial=first)
        found += [entry for entry in dict.fromkeys(entries) if entry != first]
    yield from (entry for entry in (*found, *module_entries(op)) if keeps_products(tape, entry.acts_on))


def module_entries(op: Op) -> list[Entry]:
    """Return the entries for the modules of the program around an op, the innermost first."""
    names = dict.fromkeys(name for name in reversed(op.place.classes) if not name.startswith("torch."))
    return [Entry(module=name) for name in names][:_MAX_MODULES]


def keeps_products(tape: Tape, chosen: Choice) -> bool:
    """Whether products of the step stay in half precision, if there are any, without some operators."""
    products = [op for op in tape.ops if op.phase != "backward" and is_half(op) and is_product(op)]
    return not products or not all(map(chosen, products))


def in_fp32_with(tape: Tape, has: Choice, *, within: bool = False) -> Choice:
    """Return which operators run in fp32 if some do, as an entry of a list makes them.

    What gets their fp32 results computes in fp32 too, but for products and for what else half copies were made for.

    Args:
        tape: The step.
        has: Whether an operator is one of these.
        within: Whether they are all that is called in some modules, in which half tensors that the program itself makes
            stay half.
    """
    casts: dict[int, Op] = {}
    chosen: set[Op] = set()
    wide: set[int] = set()
    # Half tensors that the program makes within the modules.
    own_half: set[int] = set()
    for op in (op for op in tape.ops if op.phase != "backward"):
        given, results = list(iter_refs((op.args, op.kwargs))), list(iter_refs(op.outputs))
        read, made = {ref.memory for ref in given}, {ref.memory for ref in results}
        feeding = {casts[memory] for memory in read if memory in casts}
        makes_half = any(ref.dtype in HALF_DTYPES for ref in results)
        is_promoted = not read.isdisjoint(wide)
        is_listed = has(op)
        if is_listed and within and not op.place.is_cast:
            halves = {ref.memory for ref in given if ref.dtype in HALF_DTYPES}
            is_listed = op.place.function not in CASTS and not (halves and halves <= own_half)
            own_half |= made if makes_half and not is_listed else set()
        if op.place.is_cast:
            casts.update(dict.fromkeys(made, op))
            # A cast to fp32 of what is fp32 by the entry, whose gradient is then fp32 too.
            chosen |= {op} if is_promoted and not makes_half else set()
        elif is_listed:
            chosen |= {op, *feeding}
            wide |= made
        elif is_promoted and not (makes_half and (feeding or is_product(op) or _stays_half(tape, op, wide))):
            chosen.add(op)
            wide |= made
        else:
            wide -= made
    # Operators of a backward pass have the places and the nodes of those of the forward pass.
    calls = {(op.place, op.node) for op in chosen if op.node != -1}
    backward = [op for op in tape.ops if op.phase == "backward"]
    chosen |= {op for op in backward if (op.place, op.node) in calls}
    # Gradients that meet are added in the dtype of the tensor whose gradients they are: that in which the next one to
    # read their sum computes. A module that is fp32 casts what it is given once, and adds its gradients before.
    sums, nodes = _sums_of_gradients(backward), {node for _, node in calls} if within else set()
    reader_is_wide: dict[int, bool] = {}
    for op in reversed(backward):
        is_wide = any(reader_is_wide.get(ref.memory) for ref in iter_refs(op.outputs))
        if op in sums and not is_wide and not sums[op] <= nodes:
            chosen.discard(op)
        reader_is_wide.update((ref.memory, op in chosen) for ref in iter_refs((op.args, op.kwargs)))
    return chosen.__contains__


def _stays_half(tape: Tape, op: Op, wide: set[int]) -> bool:
    """Whether an operator is called by a cast to half, or by a function by which a list makes what is wide half."""
    function = op.place.function
    if function in CASTS or tape.halves.get(function or ""):
        return True
    halves = {ref.memory for ref in iter_refs((op.args, op.kwargs)) if ref.dtype in HALF_DTYPES}
    return function in tape.halves and not halves <= wide


def _sums_of_gradients(backward: list[Op]) -> dict[Op, set[int | None]]:
    """Return what adds the gradients of a tensor that several calls took, each with the nodes of two of these."""
    sums: dict[Op, set[int | None]] = {}
    nodes: dict[int, int] = {}
    for op in backward:
        given = {nodes.get(ref.memory) for ref in iter_refs(op.args)}
        if op.name in ("aten::add", "aten::add_") and None not in given and given != {op.node}:
            sums[op] = given
        nodes.update((ref.memory, op.node) for ref in iter_refs(op.outputs))
    return sums
