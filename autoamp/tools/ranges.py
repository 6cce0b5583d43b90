"""Histograms of binary exponents, and the range profile: how many values of a model fp16 and bf16 would lose.

A `TorchDispatchMode` sees each operator with its result, on a list or not. The first calls at each line are run again
on half arguments, below autograd, so that nothing is recorded. Operators that write or draw random numbers are not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core import listen, local_of
from autoamp.tensors import HALF_DTYPES, dtype_name, is_capturing, iter_tensors, map_tensors
from autoamp.tools.call_sites import CallSite, in_scaling
from autoamp.tools.observer import Call, Observation, OperatorObserver
from autoamp.tools.tables import as_table
from autoamp.torch_private import current_graph_task, schema_of

_BINS, _BIAS = 256, 127
# Half of the last of fp16's 11 bits, in the bits of fp32: adding it carries into the exponent where fp16 rounds up.
_HALF_BIT = 0x1000
# From here on the carry would make inf of a finite value, such as the largest of fp32.
_NO_CARRY = 0x7F7FF000

FORMATS: dict[str, tuple[int, int, int]] = {"float16": (-25, -14, 16), "bfloat16": (-134, -126, 128)}
"""By half dtype three binary exponents. Values below the first become 0, values below the second become subnormal, and
values from the third on overflow (IEEE 754 binary16; bfloat16 has the exponents of binary32)."""

_LARGEST_SCALE_EXPONENT = 24
_ROWS_SHOWN = 20
_LEGEND = """\
largest: the power of two of the largest result. fp16 0, fp16 inf, bf16 0: how many results that dtype would make 0 or
inf. error: how far the op is off on arguments in that dtype, as a part of its result (2-norm). -: not known.
"""
# Operators that make values without reading those of their arguments.
_MAKERS = ("aten::empty", "aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand")
# Calls of an operator at each line that are run again.
_COMPARED = 2


def readable_tensors(nested: Any) -> list[Tensor]:
    """Return the floating tensors in nested values whose elements can be read.

    Left out are sparse and nested tensors, those on the meta device, and classes that dispatch by themselves, such as
    DTensors. None can be read while a CUDA graph is captured.
    """
    if is_capturing():
        return []
    found = (one for one in iter_tensors(nested) if one.is_floating_point() and one.layout is torch.strided)
    own = Tensor.__torch_dispatch__
    return [one for one in found if not (one.is_meta or one.is_nested) and type(one).__torch_dispatch__ is own]


class Exponents:
    """How many elements have each binary exponent: ``e`` for magnitudes from ``2 ** e`` to below ``2 ** (e + 1)``.

    Magnitudes are rounded to fp16's 11 bits first, so that overflows in fp16 are exact at each scale: 65520 and more
    becomes inf. The exponents are those of fp32, -126 to 127; -127 stands for all fp32 subnormals, which in bf16 count
    as subnormal. Values that only rounding takes over another limit (2 ** 128 in bf16, or exactly 2 ** -25) count as
    within it.

    Attributes:
        counts: int64 of 254 + 2 bins on the CPU: bin ``e + 127``, the last for inf and nan.
        zeros: How many elements are 0; they are in no bin.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64)
        self.zeros = 0

    def add(self, *tensors: Tensor) -> None:
        """Count the elements of those tensors that can be read (`readable_tensors`); fp64 is rounded to fp32 first."""
        for tensor in readable_tensors(tensors):
            bits = tensor.detach().float().contiguous().flatten().view(torch.int32) & 0x7FFFFFFF
            rounded = torch.where(bits < _NO_CARRY, bits + _HALF_BIT, bits)
            # Zeros have the first bin, so that one copy from the device brings all counts.
            found = torch.bincount((rounded >> 23) + (bits > 0), minlength=_BINS + 1).cpu()
            self.zeros += int(found[0])
            self.counts += found[1:]

    @classmethod
    def total(cls, several: Iterable[Exponents]) -> Exponents:
        """Return the sum of several histograms."""
        total = cls()
        for found in several:
            total.counts += found.counts
            total.zeros += found.zeros
        return total

    @property
    def elements(self) -> int:
        """How many elements were counted, zeros, inf and nan among them."""
        return int(self.counts.sum()) + self.zeros

    @property
    def nonfinite(self) -> int:
        """How many elements are inf or nan."""
        return int(self.counts[-1])

    @property
    def largest(self) -> int | None:
        """The largest exponent of a finite element; None where all are 0."""
        found = self.counts[:-1].nonzero()
        return int(found[-1]) - _BIAS if len(found) else None

    def in_format(self, dtype: str, shift: int = 0) -> dict[str, int]:
        """Return how many finite elements a half dtype would make 0, subnormal or inf.

        Args:
            dtype: A key of `FORMATS`.
            shift: Added to each exponent: the binary logarithm of a loss scale.

        Returns:
            ``{"underflow": ..., "subnormal": ..., "overflow": ...}``.
        """
        zero, normal, top = (min(max(limit - shift + _BIAS, 0), _BINS - 1) for limit in FORMATS[dtype])
        parts = {"underflow": slice(zero), "subnormal": slice(zero, normal), "overflow": slice(top, None)}
        return {name: int(self.counts[:-1][part].sum()) for name, part in parts.items()}

    def to_dict(self, shift: int = 0) -> dict[str, Any]:
        """Return ``{"exponents": {"-3": 17, ...}, "zeros": ..., "nonfinite": ..., "largest": ..., "float16": ...}``.

        Args:
            shift: That of `in_format`, whose result is added for each half dtype.
        """
        return {
            "exponents": {str(int(e) - _BIAS): int(self.counts[e]) for e in self.counts[:-1].nonzero().flatten()},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            **{dtype: self.in_format(dtype, shift) for dtype in FORMATS},
        }


@dataclass(slots=True)
class OpRange:
    """The results of one operator at one place.

    Attributes:
        op: Torch's name of the operator, such as ``"aten::addmm"``.
        within: The listed function that called it, None where none did.
        site: Where it is called.
        calls: How often.
        values: The exponents of its results.
        errors: By half dtype the largest relative error of a call on half arguments, in the 2-norm beside fp32; inf
            where a finite result became inf or nan. A dtype is absent where no call could be run again.
        compared: How many calls were run again: the first ones. 0 if the operator writes or draws random numbers.
    """

    op: str
    within: str | None
    site: CallSite
    calls: int = 0
    values: Exponents = field(default_factory=Exponents)
    errors: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    @property
    def badness(self) -> tuple[float, ...]:
        """Numbers by which places are sorted: overflows in fp16 first, then errors, then what becomes 0."""
        half = self.values.in_format("float16")
        return half["overflow"], max(self.errors.values(), default=0.0), half["underflow"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the attributes, the site as ``module`` and ``location``, and counts by half dtype."""
        return {
            **{name: getattr(self, name) for name in ("op", "within", "calls", "compared")},
            "module": self.site.module,
            "location": self.site.location,
            "errors": {name: error if math.isfinite(error) else "inf" for name, error in self.errors.items()},
            **self.values.to_dict(),
        }


class ValueProfile(OperatorObserver):
    """The exponents of values as a program computes them, within a ``with`` statement.

    Values that half precision has made 0 or inf are counted as such. Gradients are counted when an optimizer steps. Of
    a gradient that is a DTensor only the shard of this rank is counted. Other values that `readable_tensors` leaves out
    are not counted.

    Args:
        observation: The observers of the handle.

    Attributes:
        gradients: The exponents of each parameter's gradient, by its name.
        steps: How many steps optimizers made.
    """

    def __init__(self, observation: Observation) -> None:
        super().__init__(observation)
        self.gradients: dict[str, Exponents] = {}
        self.steps = 0
        self._ops: dict[tuple[str, CallSite], OpRange] = {}
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        self._stepping = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.enter_context(listen(optimizer_called=self._before_step, optimizer_returned=self._after_step))
        return self

    def before(self, call: Call) -> None:
        """Remember the outermost module, for the names of parameters."""
        # A step that raised an exception has ended, and a closure within one is a forward pass.
        self._stepping = False
        if call.modules:
            self._roots.add(call.modules[0])

    @property
    def ops(self) -> tuple[OpRange, ...]:
        """Each operator at each line, in the order of the first calls."""
        return tuple(self._ops.values())

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpRange | None:
        """Count the results of an operator, and return its row; None if it computes nothing of the model."""
        if self._stepping or current_graph_task() != -1:
            return None
        outputs, name = readable_tensors(result), func.name().partition(".")[0]
        # A view computes nothing, and an operator without floating arguments only makes values.
        aliases = [found.alias_info for found in schema_of(func).returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view or not outputs or not readable_tensors((args, kwargs)) or name.startswith(_MAKERS):
            return None
        if in_scaling(sys._getframe(1)):
            return None
        site, call = self._observation.site_here(), self._observation.here.call
        row = self._ops.get((name, site))
        if row is None:
            row = self._ops[name, site] = OpRange(name, None if call is None else call.op.name, site)
        row.calls += 1
        with self._observation.quietly():
            row.values.add(*outputs)
        return row

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Count the gradients that an optimizer is about to use, and no operator until its step has ended."""
        self._stepping = True
        self._read_gradients([param for group in optimizer.param_groups for param in group["params"]])

    def _after_step(self, *_: Any) -> None:
        self._stepping = False
        self.steps += 1

    def tables(self, scale_exponent: int = 0) -> dict[str, list[dict[str, Any]]]:
        """Return ``ops`` and ``gradients`` as rows of plain values.

        Args:
            scale_exponent: The binary logarithm of the loss scale at which gradients are counted as lost.
        """
        gradients = self.gradients.items()
        return {
            "ops": [row.to_dict() for row in self.ops],
            "gradients": [{"parameter": name, **found.to_dict(scale_exponent)} for name, found in gradients],
        }

    def _read_gradients(self, params: Iterable[Tensor]) -> None:
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        for number, param in enumerate(params):
            if param.grad is not None:
                name = names.get(id(param), f"parameter {number} of shape {tuple(param.shape)}")
                with self._observation.quietly():
                    self.gradients.setdefault(name, Exponents()).add(local_of(param.grad))


class RangeProfile(ValueProfile):
    """The profile of a ``with handle.profile_ranges()`` statement, within which this thread computes in fp32.

    Gradients are counted when an optimizer steps, unscaled; without a step, at the end of the statement.

    Args:
        observation: The observers of the handle.
        scale_of: Returns the present loss scale.

    Attributes:
        gradients: The exponents of each parameter's gradient, by its name.
        loss_scale: The loss scale at the end of the statement.
        steps: How many steps optimizers made.
    """

    def __init__(self, observation: Observation, scale_of: Callable[[], float]) -> None:
        super().__init__(observation)
        self.loss_scale = 1.0
        self._scale_of = scale_of

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.enter_context(self._observation.casts.switched(False, forced_off=True))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self.loss_scale = self._scale_of()
        if not self.steps:
            self._read_gradients([p for root in self._roots for p in root.parameters()])

    # -- profiling --

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpRange | None:
        """Count the results of an operator, and run one of its first calls again on half arguments."""
        row = super().saw(func, args, kwargs, result)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if row is None or row.compared >= _COMPARED or is_random or schema_of(func).is_mutable:
            return row
        row.compared += 1
        for dtype in HALF_DTYPES:
            name = dtype_name(dtype)
            # Some operators have no kernel for half arguments.
            with self._observation.quietly(), contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                half_args, half_kwargs = map_tensors((args, kwargs), functools.partial(_narrowed, dtype=dtype))
                again = readable_tensors(func(*half_args, **half_kwargs))
                errors = map(relative_error, again, readable_tensors(result))
                row.errors[name] = max([*errors, row.errors.get(name, 0.0)])
        return row

    # -- what it says --

    def all_values(self) -> Exponents:
        """Return the exponents of all results together."""
        return Exponents.total(row.values for row in self.ops)

    def all_gradients(self) -> Exponents:
        """Return the exponents of all gradients of parameters together, unscaled."""
        return Exponents.total(self.gradients.values())

    def loss_scales(self, dtype: str = "float16") -> tuple[float, ...]:
        """Return the powers of two from 1 to 2 ** 24 that lose fewest gradients to 0, of those without overflow.

        Gradients are those of parameters. Empty where none was seen, or where all these scales overflow.
        """
        found = self.all_gradients()
        lost = {2.0**k: found.in_format(dtype, k) for k in range(_LARGEST_SCALE_EXPONENT + 1)} if found.elements else {}
        fitting = {scale: numbers["underflow"] for scale, numbers in lost.items() if not numbers["overflow"]}
        return tuple(scale for scale, underflow in fitting.items() if underflow == min(fitting.values()))

    def verdict(self) -> str:
        """Return a sentence for each half dtype, and what loss scales lose least."""
        values, gradients = self.all_values(), self.all_gradients()
        scaled = f"gradients of parameters, times the loss scale {self.loss_scale:g},"
        lines = []
        for dtype in FORMATS:
            errors = [row.errors[dtype] for row in self.ops if dtype in row.errors]
            lines.append(
                f"{dtype}: {_lost(values, 'results', dtype)}; "
                f"{_lost(gradients, scaled, dtype, self._scale_exponent())}; "
                f"largest relative error of an op {f'{max(errors):.2g}' if errors else 'unknown'}"
            )
        if scales := self.loss_scales():
            lines.append(f"float16 loses fewest gradients at loss scales {scales[0]:g} to {scales[-1]:g}")
        elif gradients.elements:
            lines.append("float16 gradients overflow at every loss scale from 1 on; bfloat16 needs none")
        return "\n".join(lines)

    def _scale_exponent(self) -> int:
        return round(math.log2(self.loss_scale)) if self.loss_scale > 0 else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: ``loss_scale``, ``loss_scales``, ``ops`` and ``gradients`` as rows, and ``verdict``."""
        return {
            "schema": 2,
            "kind": "autoamp.ranges",
            "torch": torch.__version__,
            "steps": self.steps,
            "loss_scale": self.loss_scale,
            "loss_scales": list(self.loss_scales()),
            "verdict": self.verdict(),
            **self.tables(self._scale_exponent()),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        headings = (
            "op", "module", "called at", "largest", "fp16 0", "fp16 inf", "bf16 0", "fp16 error", "bf16 error",
        )  # fmt: skip
        lines = []
        for row in sorted(self.ops, key=lambda row: row.badness, reverse=True)[:_ROWS_SHOWN]:
            half, brain = row.values.in_format("float16"), row.values.in_format("bfloat16")
            top = row.values.largest
            lines.append((
                row.op.removeprefix("aten::"), row.site.where, row.site.location or "-",
                "-" if top is None else f"2^{top}", str(half["underflow"]), str(half["overflow"]),
                str(brain["underflow"]),
                *(f"{row.errors[d]:.1e}" if d in row.errors else "-" for d in ("float16", "bfloat16")),
            ))  # fmt: skip
        title = "Ranges in fp32, the worst places first"
        if len(self.ops) > _ROWS_SHOWN:
            title += f": {_ROWS_SHOWN} of {len(self.ops)}; to_json() has all, and so has --json FILE"
        return as_table(title, headings, lines, 6) + (_LEGEND if lines else "") + self.verdict() + "\n"


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


def relative_error(half: Tensor, full: Tensor) -> float:
    """Return the 2-norm of the difference from the fp32 tensor, divided by that of it, where it is finite."""
    if half.shape != full.shape:
        return 0.0
    fine = full.isfinite()
    full, half = full.where(fine, 0.0), half.float().where(fine, 0.0)
    norms = (torch.linalg.vector_norm(one, dtype=torch.float64) for one in (half - full, full))
    difference, size = map(float, norms)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def _lost(found: Exponents, what: str, dtype: str, shift: int = 0) -> str:
    """Return how many values a dtype would lose."""
    lost = found.in_format(dtype, shift)
    return (
        f"of {found.elements:,} {what} {lost['overflow']:,} overflow, {lost['underflow']:,} become 0, "
        f"{lost['subnormal']:,} are subnormal"
    )
