"""What is found where a step, or a call of a model, is run again: which op made inf or nan, and whether fp32 cures it.

Whoever runs it again offers trials: at a loss scale, in half precision or in fp32. Each is looked on at op by op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from autoamp.diagnostics.inspector import Backward, Flaw, Inspector, Origin, Site, flaw_of
from autoamp.diagnostics.op_names import fp32_entry
from autoamp.diagnostics.verdicts import (
    HalfPrecisionOp,
    NotFiniteInFp32,
    NotLocated,
    Overflow,
    OverflowVerdict,
    ScaleSearch,
)
from autoamp.tensors import HALF_DTYPES, dtype_name

__all__ = ["CannotReplay", "Trial", "Trials", "backward_finding", "of_site", "output_finding"]


class CannotReplay(Exception):
    """What is to run again cannot; its message says why."""


@dataclass(eq=False)
class Trial:
    """What ran once more.

    Attributes:
        inspector: What looked on at the forward pass.
        outputs: The losses of a step, or what a call returned; None in the place of what has no floating dtype.
        inputs: The tensors that went in, with the names of the arguments.
        leaves: What gradients are taken of, by name.
        results: These gradients.
        watch: What looked on at the last backward pass.
        failure: Why that pass could not be run; None where it was.
    """

    inspector: Inspector
    outputs: list[Tensor | None] = field(default_factory=list)
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    watch: Backward | None = None
    failure: CannotReplay | None = None

    def backward_by(self, gradients: Sequence[Tensor | None]) -> Backward:
        """Take the gradients of all leaves by those at the outputs, and keep them in ``results``."""
        pairs = [
            (output, gradient.to(output.dtype))
            for output, gradient in zip(self.outputs, gradients, strict=True)
            if output is not None and gradient is not None and output.requires_grad
        ]
        return self.differentiate([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def differentiate(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> Backward:
        """Take the gradients of all leaves, from some tensors and the gradients at these, and keep them."""
        watch = self.watch = Backward(self.inspector)
        self.results, self.failure = {}, None
        if roots and self.leaves:
            try:
                with watch:
                    found = torch.autograd.grad(
                        roots, list(self.leaves.values()), gradients, retain_graph=True, allow_unused=True
                    )
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                self.failure = CannotReplay(f"running the step again raised {type(error).__name__}: {first}")
                return watch
            self.results = {name: one for name, one in zip(self.leaves, found, strict=True) if one is not None}
        return watch

    def flawed(self) -> dict[int, str]:
        """Return the names of the leaves whose gradients are not finite, by their ids.

        Raises:
            CannotReplay: The backward pass raised, as that of a checkpoint does that cannot be run in this way.
        """
        if self.failure is not None:
            raise self.failure
        return {id(self.leaves[name]): name for name, one in self.results.items() if flaw_of(one) is not None}

    def producer(self) -> Any:
        """Return the call whose node made inf or nan of finite gradients, and what it got and gave; None if unknown."""
        flawed = self.flawed()
        return None if self.watch is None else self.watch.producer(lambda tensor: id(tensor) in flawed)


class Trials(Protocol):
    """What can be run again."""

    def trial(self, scale: float, *, wide: bool = False) -> Trial:
        """Run it at a loss scale, in fp32 where ``wide`` says so."""


def output_finding(trials: Trials, first: Trial, number: int, *, intended: bool) -> Overflow | None:
    """Return the finding for an output that is not finite.

    Args:
        trials: What is run again.
        first: How it ran in half precision.
        number: Of the output.
        intended: Whether -inf is blamed as well that may have been written on purpose.
    """
    output = first.outputs[number]
    if output is None or flaw_of(output) is None:
        return None
    origin = first.inspector.origin_of(output)
    if origin.intended and not intended:
        return None
    if origin.site is None:
        return _given_finding(origin, first)
    try:
        wide = trials.trial(1.0, wide=True)
    except (CannotReplay, RuntimeError) as error:
        return of_site(origin.site, _unknown_in_fp32(error), "forward", origin.flaw)
    value = wide.outputs[number] if number < len(wide.outputs) else None
    found = None if value is None or flaw_of(value) is None else wide.inspector.origin_of(value)
    return _origin_finding(origin, None if found is not None and found.intended and not intended else found, wide)


def backward_finding(trials: Trials, first: Trial, scale: float) -> Overflow | None:
    """Return the finding for gradients that are not finite though outputs are; None where all gradients are finite.

    Lower scales are tried, of which the highest that does is found, and fp32.

    Args:
        trials: What is run again.
        first: How it ran at the loss scale.
        scale: The loss scale.
    """
    flawed = first.flawed()
    if not flawed:
        return None
    made = first.producer()
    parameter = next((name for name in flawed.values() if not name.startswith("input ")), next(iter(flawed.values())))
    if scale > 1.0 and not trials.trial(1.0).flawed():
        finite = _finest_scale(scale, lambda lower: not trials.trial(lower).flawed())
        return _found_backward(made, ScaleSearch(finite), parameter)
    source = None if made is None else made[0].source
    if source is not None and source.site is None and not source.intended:
        return replace(_given_finding(source, first), parameter=parameter)
    try:
        wide = trials.trial(1.0, wide=True)
        wide_flawed = wide.flawed()
    except (CannotReplay, RuntimeError) as error:
        return _found_backward(made, _unknown_in_fp32(error), parameter)
    if source is not None and not source.intended:
        # The forward pass made it, though the outputs do not show it.
        origins = [one for one in wide.inspector.origins if not one.intended] if wide_flawed else []
        found = _origin_finding(source, origins[0] if origins else None, wide)
        return replace(found, parameter=parameter)
    found = _found_backward(made, None, parameter, wide.producer(), finite_in_fp32=not wide_flawed)
    return _with_all_names(found, first.inspector, wide)


def _unknown_in_fp32(why: object) -> NotLocated:
    return NotLocated(f"it is not known whether fp32 would be finite: {why}")


def _origin_finding(origin: Origin, in_fp32: Origin | None, wide: Trial) -> Overflow:
    """Return the finding for an inf or nan of the forward pass, by where it is from in half precision and in fp32."""
    assert origin.site is not None
    wide_site = None if in_fp32 is None else in_fp32.site
    if wide_site is not None and wide_site.dtype in HALF_DTYPES:
        if _place(wide_site) == _place(origin.site):
            why = _unknown_in_fp32("it writes to a half tensor in place")
            return of_site(origin.site, why, "forward", origin.flaw)
        # In fp32 it was finite until it was written to a tensor that the program made half.
        in_fp32 = None
    if in_fp32 is None:
        half = origin.site.dtype if origin.site.dtype in HALF_DTYPES else torch.float16
        verdict = HalfPrecisionOp(origin.magnitudes, dtype_name(half), origin.site.in_cast)
        return of_site(origin.site, verdict, "forward", origin.flaw)
    if in_fp32.site is None:
        return _given_finding(in_fp32, wide)
    return of_site(in_fp32.site, NotFiniteInFp32(magnitudes=in_fp32.magnitudes), "forward", in_fp32.flaw)


def _given_finding(origin: Origin, trial: Trial) -> Overflow:
    """Return the finding for an inf or nan that no op made: an input, a parameter or a buffer holds it."""
    tensor, root = origin.tensor, trial.inspector.root
    name = None if root is None else type(root).__name__
    common = {"phase": "forward", "value": origin.flaw.value}
    for argument, one in trial.inputs:
        if tensor is not None and _is(one, tensor):
            index = batch_index(one)
            verdict = NotFiniteInFp32(cause="data", tensor=argument, batch_index=index)
            return Overflow(verdict, module=name, suggestion="look at the data of this batch", **common)  # type: ignore[arg-type]
    for path, one in [] if root is None else [*root.named_parameters(), *root.named_buffers()]:
        if tensor is not None and _is(one, tensor):
            verdict = NotFiniteInFp32(cause="weights", tensor=path)
            owner = path.rpartition(".")[0] or name
            return Overflow(
                verdict, module=owner, suggestion="load an earlier checkpoint, or initialize it again", **common  # type: ignore[arg-type]
            )  # fmt: skip
    why = "it comes from code that is not recorded, such as TorchScript, torch.func, numpy or another library"
    return Overflow(NotLocated(why), **common)  # type: ignore[arg-type]


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def batch_index(tensor: Tensor) -> int | None:
    """Return the first index along the first dimension at which a tensor is not finite; None for a scalar."""
    if tensor.dim() == 0:
        return None
    bad = ~torch.isfinite(tensor.detach())
    rows = bad.reshape(bad.shape[0], -1).any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None


def of_site(site: Site, verdict: OverflowVerdict, phase: str, flaw: Flaw, otherwise: str | None = None) -> Overflow:
    """Return the finding for what an op made, with the entry of a list file that avoids it, or with another remedy."""
    names = site.names if isinstance(verdict, HalfPrecisionOp) else ()
    return Overflow(
        verdict, op=site.op, module=site.module, location=site.location, phase=phase,
        suggestion=fp32_entry(names, site.in_place) or otherwise, value=flaw.value, fp32_names=names,
    )  # fmt: skip


def _finest_scale(scale: float, finite_at: Callable[[float], bool]) -> float:
    """Return the highest scale, by halving, at which gradients are finite.

    Args:
        scale: One at which they are not; at 1.0 they are.
        finite_at: Tells whether they are at a scale.
    """
    low, high = 0, max(1, math.ceil(math.log2(scale)))
    # The least number of halvings that does; `high` does.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finite_at(scale * 2.0**-middle) else (middle, high)
    return max(scale * 2.0**-high, 1.0)


def _found_backward(
    made: Any,
    search: ScaleSearch | NotLocated | None,
    parameter: str,
    in_fp32: Any = None,
    *,
    finite_in_fp32: bool = True,
) -> Overflow:
    """Return the finding for gradients that are not finite.

    Args:
        made: The call, and what its node got and gave, that made inf or nan of finite gradients; None if unknown.
        search: The verdict where a lower scale does, or where fp32 could not be tried.
        parameter: The first parameter whose gradient is not finite.
        in_fp32: As ``made``, in fp32.
        finite_in_fp32: Whether gradients are finite in fp32.
    """
    if not finite_in_fp32 and in_fp32 is not None:
        made = in_fp32
    if made is None:
        unknown = NotLocated("gradients have inf or nan, and no recorded op made them from finite values")
        return Overflow(search or unknown, phase="backward", parameter=parameter)
    site, result = made
    verdict: OverflowVerdict = search or NotFiniteInFp32(magnitudes=result.magnitudes)
    if search is None and finite_in_fp32:
        verdict = HalfPrecisionOp(result.magnitudes, _dtype_name(site), in_cast=site.in_cast)
    return replace(of_site(site, verdict, "backward", result.flaw), parameter=parameter)


def _with_all_names(found: Overflow, half: Inspector, wide: Trial) -> Overflow:
    """Return a finding of the backward pass whose entry names all ops that are to be in fp32 for it to be avoided.

    The gradient that overflows may be too large for the results of ops before as well: these have it in their dtype.

    Args:
        found: The finding.
        half: What looked on in half precision.
        wide: The same in fp32, at a loss scale of 1.
    """
    in_fp32 = wide.watch
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
    casts = [line for node, line in wide.inspector.narrowed if node in too_large]
    if casts:
        suggestion = f"{suggestion}, and make no half tensor at {casts[0]}, whose gradient is as large"
    return replace(found, suggestion=suggestion, fp32_names=all_names)


def _place(site: Site) -> tuple[str, str | None, str | None]:
    return site.op, site.module, site.location


def _dtype_name(site: Site) -> str:
    return dtype_name(site.dtype if site.dtype in HALF_DTYPES else torch.float16)
