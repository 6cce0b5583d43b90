"""What the sweep runs: OpInfo samples with their arguments in each dtype, under every spelling, and what to expect."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import autoamp
from autoamp.core import CastPolicy, expand, shipped_table

FP32, FP64 = torch.float32, torch.float64
FLOATS = frozenset({torch.float16, torch.bfloat16, FP32})
HALVES = (torch.float16, torch.bfloat16)
# The arguments' dtypes, by position among the floating ones.
MODES: dict[str, Callable[[torch.dtype, int], torch.dtype]] = {
    "half": lambda half, index: half,
    "fp32": lambda half, index: FP32,
    "half first": lambda half, index: FP32 if index else half,
    "fp32 first": lambda half, index: half if index else FP32,
}
# Error bounds: multiples of the dtype's eps, by what is computed in it.
UNITS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, FP32: 2.0**-23, FP64: 2.0**-52}

OPS = {f"{op.name}{'/' * bool(op.variant_test_name)}{op.variant_test_name}": op for op in op_db if FP32 in op.dtypes}


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments as a flat list, so that their tensors can be given other dtypes."""

    leaves: tuple[Any, ...]
    spec: Any
    floating: tuple[int, ...]
    wanting: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Call:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dtype == FP32]
        wanting = [i for i in floating if leaves[i].requires_grad]
        detached = (leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(tuple(detached), spec, tuple(floating), tuple(wanting))

    def cast(self, dtype_of: Callable[[int], torch.dtype]) -> Call:
        """Return the call with its floating tensors cast; `dtype_of` takes their place among those."""
        leaves = list(self.leaves)
        for place, index in enumerate(self.floating):
            if leaves[index].layout is torch.strided:
                leaves[index] = leaves[index].to(dtype_of(place))
        return dataclasses.replace(self, leaves=tuple(leaves))

    def by_policy(self, policy: CastPolicy | None, half: torch.dtype) -> Call:
        """Return the call with its arguments cast by hand, as a policy says."""
        dtypes = {self.leaves[index].dtype for index in self.floating}
        if policy is CastPolicy.FP16:
            return self.cast(lambda _: half)
        if policy in (CastPolicy.FP32, CastPolicy.BANNED) or (policy is CastPolicy.PROMOTE and len(dtypes) > 1):
            return self.cast(lambda _: FP32)
        return self

    def fresh(self, *, grad: bool = False) -> tuple[Call, tuple[Any, dict[str, Any]]]:
        """Return a call on copies, and its arguments."""
        with casts_off():
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        if grad:
            for index in self.wanting:
                leaves[index].requires_grad_()
        return dataclasses.replace(self, leaves=tuple(leaves)), tree_unflatten(leaves, self.spec)


def samples(op: Any) -> Iterator[tuple[Call, Callable[[Any], Any]]]:
    """Yield every sample of an op in fp32, and what takes the comparable part of its result."""
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", FP32, requires_grad=op.supports_autograd):
        yield Call.of((sample.input, *sample.args), sample.kwargs), sample.output_process_fn_grad


@dataclasses.dataclass(frozen=True)
class Variant:
    """One spelling of an op."""

    name: str
    function: Callable[..., Any]
    policies: dict[torch.dtype, CastPolicy | None]
    strict: bool

    @property
    def in_place(self) -> bool:
        """Whether it writes to its first argument."""
        return self.name.startswith("in-place")


@functools.cache
def policies_by_place(half: torch.dtype) -> dict[tuple[int, str], CastPolicy]:
    """Return the policy of each patched attribute."""
    lists = "bf16" if half is torch.bfloat16 else "default"
    found = expand(shipped_table(lists, "cpu")).targets
    return {(id(target.parent), target.attribute): target.rule.policy for target in found}


def variants(op: Any) -> Iterator[Variant]:
    """Yield every spelling of an op, looked up anew at each call: patches come and go."""
    parent: Any = torch
    *path, last = op.name.split(".")
    for part in path:
        parent = getattr(parent, part, None)
    if getattr(parent, last, None) is op.op:
        yield _looked_up("function", parent, last)
    else:
        # A function of the test helpers, which calls the op in its own way.
        by_half = {half: _by_name(last, half) for half in HALVES}
        yield Variant("function", op.op, by_half, strict=False)
    if op.method_variant is not None and getattr(Tensor, last, None) is op.method_variant:
        yield _looked_up("method", Tensor, last)
    if op.inplace_variant is not None and getattr(Tensor, f"{last}_", None) is op.inplace_variant:
        yield _looked_up("in-place", Tensor, f"{last}_")
    for name, function in (("operator", op.operator_variant), ("in-place operator", op.inplace_operator_variant)):
        dunder = None if function is None else f"__{getattr(function, '__name__', '').strip('_')}__"
        if dunder is not None and function is getattr(operator, dunder, None) and hasattr(Tensor, dunder):
            by_half = {half: policies_by_place(half).get((id(Tensor), dunder)) for half in HALVES}
            yield Variant(name, function, by_half, strict=True)


def _looked_up(name: str, parent: Any, attribute: str) -> Variant:
    by_half = {half: policies_by_place(half).get((id(parent), attribute)) for half in HALVES}
    # What is written in Python and has no policy is as its patched parts make it.
    held = getattr(parent, attribute)
    strict = by_half[torch.float16] is not None or not isinstance(held, types.FunctionType)
    return Variant(name, lambda *args, **kwargs: getattr(parent, attribute)(*args, **kwargs), by_half, strict)


@functools.cache
def comparable(name: str) -> bool:
    """Whether an op computes the same in every dtype: what is drawn or left unwritten differs."""
    bare = name.split(".")[-1]
    rules = [shipped_table("default").policy_of(name) for name in (bare, f"{bare}_")]
    reasons = {rule.reason for rule in rules if rule is not None}
    drawn = any(reason.startswith(("random", "creates a tensor")) for reason in reasons)
    return not drawn and not bare.startswith(("fractional", "rand"))


@functools.cache
def _by_name(name: str, half: torch.dtype) -> CastPolicy | None:
    rule = shipped_table("bf16" if half is torch.bfloat16 else "default").policy_of(name)
    return None if rule is None or rule.policy is CastPolicy.NONE else rule.policy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call came to: its result and gradients, or its exception. `leaves` are its arguments afterwards."""

    leaves: tuple[Any, ...]
    result: Any = None
    gradients: tuple[Any, ...] = ()
    error: Exception | None = None
    backward_error: Exception | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_flatten(self.result)[0] if isinstance(leaf, Tensor)]


def run(
    function: Callable[..., Any],
    call: Call,
    part: Callable[[Any], Any] = lambda result: result,
    *,
    grad: bool = False,
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Call an op on copies of its arguments, from one seed; backward too where asked and possible."""
    call, (args, kwargs) = call.fresh(grad=grad)
    torch.default_generator.manual_seed(1)
    with warnings.catch_warnings(), around or contextlib.nullcontext():
        warnings.simplefilter("ignore")
        try:
            result = function(*args, **kwargs)
            with casts_off():
                outcome = Outcome(call.leaves, part(result))
        except Exception as error:  # whatever torch raises is to be compared
            return Outcome(call.leaves, error=error)
        if not grad:
            return outcome
        try:
            return dataclasses.replace(outcome, gradients=gradients(outcome.tensors, call))
        except Exception as error:
            return dataclasses.replace(outcome, backward_error=error)


def casts_off() -> contextlib.AbstractContextManager[None]:
    """Keep autoamp, where it is active, from what the sweep itself computes."""
    handle = autoamp.current_handle()
    return contextlib.nullcontext() if handle is None else handle.disable_casts()


def gradients(outputs: list[Tensor], call: Call) -> tuple[Any, ...]:
    """Return the gradients of a weighted sum of the outputs."""
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        return ()
    weights = [
        torch.linspace(0.5, 1.5, output.numel(), dtype=FP64).reshape(output.shape).to(output.dtype)
        for output in outputs
    ]
    leaves = [call.leaves[index] for index in call.wanting]
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True)


def distance(got: Tensor, wanted: Tensor, unit: float) -> float:
    """Return the largest difference in units of the last place of what is computed in.

    Measured against each element and against the size of them all, as sums cancel. An element that the dtype cannot
    hold counts as right where it is inf.
    """
    if got.shape != wanted.shape:
        return float("inf")
    if got.is_complex() or wanted.is_complex():
        got, wanted = (torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) for tensor in (got, wanted))
    got, wanted = got.detach().to(FP64), wanted.detach().to(got.dtype if got.is_floating_point() else FP64).to(FP64)
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    finite = wanted[wanted.isfinite()].abs()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
    off = (got - wanted).abs() / (unit * (wanted.abs() + size + 1e-6))
    return float(torch.where(same, 0.0, off).nan_to_num(nan=float("inf")).max())
