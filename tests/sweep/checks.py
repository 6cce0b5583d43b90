"""What must hold of an op under autoamp, beside plain torch, torch.autocast and fp64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

import autoamp
from autoamp.core import CastPolicy

from .cases import (
    FLOATS,
    FP32,
    FP64,
    MODES,
    UNITS,
    Call,
    Outcome,
    Variant,
    comparable,
    distance,
    run,
    samples,
    variants,
)

# Units of the last place, of the coarsest dtype that takes part.
BOUND = 64.0
# In fp16 every sample goes through the function. Other spellings, arguments of several dtypes and `out=` get so many.
FEW = 16
# bf16 goes the same way by another list: so many samples of an op go through the function, spread over all of them.
MOST_IN_BF16 = 24
# Its kernel for volumes takes seconds a call.
SLOW = {"grid_sampler_3d": 2}


@dataclasses.dataclass(frozen=True)
class Before:
    """What a call comes to without autoamp."""

    call: Call
    policy: CastPolicy | None
    plain: Outcome
    autocast: Outcome
    by_hand: Outcome
    exact: Outcome
    comparable: bool
    out: dict[str, tuple[bool, bool]]


def before(
    op: Any, variant: Variant, call: Call, part: Callable[[Any], Any], half: torch.dtype, *, grad: bool, with_out: bool
) -> Before:
    """Run a call in plain torch, under torch.autocast, with arguments cast by hand, and in fp64 on those."""
    function, policy = variant.function, variant.policies[half]
    grad = grad and bool(call.wanting)
    cast = call.by_policy(policy, half)
    by_hand = run(function, cast, part, grad=grad)
    plain = by_hand if cast is call else run(function, call, part)
    autocast = plain
    if plain.error is not None:
        autocast = run(function, call, part, around=torch.autocast("cpu", dtype=half))
    exact = run(function, cast.cast(lambda _: FP64), part, grad=grad)
    out = _takes_out(function, call, cast, plain, by_hand) if with_out else {}
    return Before(call, policy, plain, autocast, by_hand, exact, comparable(op.name), out)


OUT_DTYPES = ("of the result", "of plain torch", "fp32")


def _buffers(kind: str, plain: Outcome, by_hand: Outcome) -> Any:
    """Buffers for `out=` of one kind of dtype, in the form of the result; None where there are none."""
    held = plain if kind == "of plain torch" else by_hand
    if held.error is not None or not held.tensors or len(held.tensors) != len(tree_flatten(held.result)[0]):
        return None
    buffers = [
        torch.empty(tensor.shape, dtype=FP32 if kind == "fp32" and tensor.dtype in FLOATS else tensor.dtype)
        for tensor in held.tensors
    ]
    return buffers[0] if isinstance(held.result, Tensor) else tuple(buffers)


def _with_out(function: Callable[..., Any], call: Call, buffers: Any) -> tuple[Outcome, list[Tensor]]:
    held: list[Tensor] = []

    def write(*args: Any, **kwargs: Any) -> Any:
        held.extend(tree_flatten(tree_map(_fresh, buffers))[0])
        out = held[0] if isinstance(buffers, Tensor) else tuple(held)
        return function(*args, **kwargs, out=out)

    return run(write, call), held


def _fresh(buffer: Tensor) -> Tensor:
    """A buffer of its own, of nan where it can be: torch's ihfftn over one dimension reads what it is to write to."""
    fresh = torch.clone(buffer)
    return fresh.fill_(float("nan")) if fresh.is_floating_point() or fresh.is_complex() else fresh


def _takes_out(
    function: Callable[..., Any], call: Call, cast: Call, plain: Outcome, by_hand: Outcome
) -> dict[str, tuple[bool, bool]]:
    """For each kind of `out=` buffers, whether torch writes to them, and whether what it writes is its result.

    It is not for a few ops, and where the comparable part of a result is less than the result.
    """
    found = {}
    for kind in OUT_DTYPES:
        buffers = _buffers(kind, plain, by_hand)
        if buffers is not None:
            works = _with_out(function, call, buffers)[0].error is None
            got, held = _with_out(function, cast, buffers)
            found[kind] = works, got.error is not None or _error(held, by_hand.tensors, _out_unit(held, by_hand)) <= 16
    return found


def _out_unit(held: list[Tensor], result: Outcome) -> float:
    return max(UNITS.get(tensor.dtype, 0.0) for tensor in (*held, *result.tensors)) or UNITS[FP32]


def _out(known: Before, variant: Variant) -> Iterator[str]:
    """`out=` is written to in its own dtype, with what the op returns without it."""
    for kind, (works, is_result) in known.out.items():
        buffers = _buffers(kind, known.plain, known.by_hand)
        got, held = _with_out(variant.function, known.call, buffers)
        if got.error is not None:
            if works:
                yield f"out= {kind} raised {got.error!r:.100}"
            continue
        wanted = tree_flatten(buffers)[0]
        if [tensor.dtype for tensor in held] != [tensor.dtype for tensor in wanted]:
            yield f"out= {kind} has another dtype"
        if any(returned is not out for returned, out in zip(got.tensors, held, strict=False)):
            yield f"out= {kind} is not what was returned"
        if known.comparable and is_result:
            unit = _out_unit(held, known.by_hand)
            error = _error(
                held, known.by_hand.tensors, max(unit, _coarsest(known.call)) if known.policy is None else unit
            )
            if error > 16:
                yield f"out= {kind} differs from the result by {error:.0f} units"


def faults(known: Before, variant: Variant, half: torch.dtype, part: Callable[[Any], Any]) -> Iterator[str]:
    """Run a call under autoamp, which is active, and tell what is wrong with it."""
    grad = bool(known.by_hand.gradients) and known.by_hand.backward_error is None
    got = run(variant.function, known.call, part, grad=grad)
    if got.error is not None:
        yield from _wrongly_raised(known, got.error)
        return
    if known.by_hand.error is None:
        yield from _dtypes(known, variant, got, half)
    if grad and got.backward_error is not None:
        yield f"backward raised {got.backward_error!r:.120}"
    if known.plain.error is None or known.by_hand.error is None:
        yield from _written(known, variant, got)
    yield from _out(known, variant)
    if known.exact.error is None and known.comparable:
        unit = _unit(known, variant, got, half)
        error = _error(got.tensors, known.exact.tensors, unit)
        if error > BOUND and not (unit == UNITS[FP32] and _no_worse(got.tensors, known.by_hand.tensors)):
            yield f"differs from fp64 by {error:.0f} units"
        if grad and got.gradients and known.exact.gradients:
            pairs = [(a, b) for a, b in zip(got.gradients, known.exact.gradients, strict=True) if a is not None]
            off = _error([a for a, _ in pairs], [b for _, b in pairs], max(unit, _coarsest(known.call)))
            if off > BOUND and not _no_worse(got.gradients, known.by_hand.gradients):
                yield f"gradient differs from fp64 by {off:.0f} units"


def _no_worse(got: Iterable[Tensor | None], by_hand: Iterable[Tensor | None]) -> bool:
    """Whether torch itself comes to the same on arguments cast by hand: then its kernel is what is inexact."""
    return all(
        a is None or (b is not None and distance(a.to(FP32), b.to(FP32), max(UNITS[a.dtype], UNITS[b.dtype])) <= 2)
        for a, b in zip(got, by_hand, strict=False)
    )


def _wrongly_raised(known: Before, error: Exception) -> Iterator[str]:
    if known.plain.error is None or known.autocast.error is None or known.by_hand.error is None:
        yield f"raised {error!r:.160}"
    elif not isinstance(error, (type(known.plain.error), type(known.by_hand.error))):
        yield f"raised {type(error).__name__}, and torch {type(known.plain.error).__name__}"


def _dtypes(known: Before, variant: Variant, got: Outcome, half: torch.dtype) -> Iterator[str]:
    for output, wanted in zip(got.tensors, known.by_hand.tensors, strict=False):
        if variant.in_place:
            if output.dtype != known.call.leaves[0].dtype:
                yield f"returned {output.dtype} for an in-place form of {known.call.leaves[0].dtype}"
            continue
        inside = {FP32, half} if not variant.strict and {output.dtype, wanted.dtype} <= {FP32, half} else set()
        if output.dtype != wanted.dtype and output.dtype not in inside:
            yield f"returned {output.dtype}, not {wanted.dtype}"
    if len(got.tensors) != len(known.by_hand.tensors):
        yield f"returned {len(got.tensors)} tensors, not {len(known.by_hand.tensors)}"
    for index, gradient in zip(known.call.wanting, got.gradients, strict=False):
        if gradient is not None and gradient.dtype != known.call.leaves[index].dtype:
            yield f"gave a gradient in {gradient.dtype} for {known.call.leaves[index].dtype}"


def _written(known: Before, variant: Variant, got: Outcome) -> Iterator[str]:
    """An argument is written to where the op itself writes to it, and nowhere else."""
    witness = known.by_hand if known.plain.error is not None else known.plain
    for index, leaf in enumerate(known.call.leaves):
        if variant.in_place and index == 0:
            continue
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            ours, theirs = _changed(leaf, got.leaves[index]), _changed(leaf, witness.leaves[index])
            if ours and not theirs:
                yield f"wrote to argument {index}"
            if theirs and not ours and known.plain.error is None:
                yield f"did not write to argument {index}"


def _changed(before: Tensor, after: Tensor) -> bool:
    after = after.detach()
    if before.shape != after.shape:
        return True
    same = (before == after.to(before.dtype)) | ((before != before) & (after != after))
    return not bool(same.all())


def _coarsest(call: Call) -> float:
    return max((UNITS[call.leaves[index].dtype] for index in call.floating), default=UNITS[FP32])


def _unit(known: Before, variant: Variant, got: Outcome, half: torch.dtype) -> float:
    """The unit of the coarsest dtype that took part."""
    dtypes = {tensor.dtype for tensor in got.tensors if tensor.dtype in FLOATS} or {FP32}
    if known.policy is None:
        dtypes |= {known.call.leaves[index].dtype for index in known.call.floating}
    if known.policy is CastPolicy.FP16 or not variant.strict:
        dtypes.add(half)
    return max(UNITS[dtype] for dtype in dtypes)


def _error(got: list[Tensor], wanted: list[Tensor], unit: float) -> float:
    return max(
        (
            distance(a, b, unit)
            for a, b in zip(got, wanted, strict=False)
            if a.layout is torch.strided and b.layout is torch.strided and not a.is_quantized
        ),
        default=0.0,
    )


def sweep(name: str, half: torch.dtype, op: Any) -> Iterator[str]:
    """Tell what is wrong with an op in one half dtype."""
    cases = list(itertools.islice(samples(op), SLOW.get(name)))
    chosen = cases if half is torch.float16 else cases[:: math.ceil(len(cases) / MOST_IN_BF16) or 1]
    work: list[tuple[Variant, str, list[tuple[Before, Callable[[Any], Any]]]]] = []
    for variant in variants(op):
        for mode, dtype_of in MODES.items():
            mixed = mode not in ("half", "fp32")
            given = [
                (call.cast(functools.partial(dtype_of, half)), part)
                for call, part in (cases[:FEW] if mixed or variant.name != "function" else chosen)
                if not mixed or len(call.floating) > 1
            ]
            grad = op.supports_autograd and not variant.in_place
            with_out = FEW if op.supports_out and variant.name == "function" else 0
            known = [
                (before(op, variant, call, part, half, grad=grad, with_out=place < with_out), part)
                for place, (call, part) in enumerate(given)
            ]
            work.append((variant, mode, known))
    with active(half):
        for variant, mode, known in work:
            remarks = dict.fromkeys(fault for one, part in known for fault in faults(one, variant, half, part))
            if remarks:
                yield f"{half}, {mode}, {variant.name} ({variant.policies[half]}): {'; '.join(remarks)}"


@contextlib.contextmanager
def active(half: torch.dtype) -> Iterator[None]:
    """Patch torch for a block, by the list set of the half dtype."""
    handle = autoamp.init(device_type="cpu", dtype=half, lists="bf16" if half is torch.bfloat16 else "default")
    try:
        yield
    finally:
        handle.deactivate()
