"""Follows inf and nan through the tape of a step: which operator made them, and whether they reach gradients.

An inf or nan is followed from the operator that made it (its *origin*) through those that pass it on, until one gives a
finite result, as a softmax does of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoamp.core import original_of
from autoamp.tensors import HALF_DTYPES, iter_tensors
from autoamp.tools.call_sites import WRITERS
from autoamp.tools.ranges import relative_error
from autoamp.tools.tape import Choice, Load, Op, Place, Ref, Rerun, Tape, iter_refs, writes_of, written
from autoamp.torch_private import undisturbed

# These overwrite all of their first argument.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_")
)
# In training these write their running statistics, which the result does not depend on.
_NORMS = frozenset(f"aten::{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
_CHECK = "aten::_amp_foreach_non_finite_check_and_unscale_"
# Gradients below this part of the largest one differ in any precision.
_SMALL = 1e-3
# Torch's own, also if this file is imported while lists are in force.
_SUM: Any = original_of(Tensor.sum)


def nonfinite_value(*tensors: Tensor | None) -> str | None:
    """Return ``"nan"`` if any tensor holds nan, else ``"inf"`` if any holds inf, else None."""
    values = [one.detach() for one in tensors if one is not None and one.is_floating_point() and not one.is_sparse]
    # A finite sum has finite terms. A sum of finite terms may overflow.
    values = [value for value in values if not math.isfinite(_SUM(value, dtype=torch.float32).item())]
    if any(bool(torch.isnan(value).any()) for value in values):
        return "nan"
    return "inf" if any(bool(torch.isinf(value).any()) for value in values) else None


def bare_op(op: Op) -> str:
    """Return the name of an operator as lists have it: ``mul`` for ``aten::mul_``."""
    return op.place.function or op.name.partition("::")[2].strip("_")


@dataclass(eq=False)
class NonFiniteOrigin:
    """Where inf or nan came from.

    Attributes:
        op: The operator that made it of finite values; None if it came from outside of the tape.
        place: Where that was called; for a cast that was made for an op, where the op was. Without an operator it is
            where the tensor was first read.
        ref: The tensor in which it was first seen.
        value: ``"inf"``, or ``"nan"`` if there is any.
        number: How many operators ran before.
        magnitudes: The largest absolute value of each floating tensor that the operator read.
        intended: Whether programs write such an inf on purpose.
    """

    op: Op | None
    place: Place
    ref: Ref
    value: str
    number: int
    magnitudes: tuple[float, ...] = ()
    intended: bool = False


class Followed(Rerun):
    """A run of a tape in which inf and nan were followed.

    Args:
        tape, in_fp32, factor: As for `Rerun`.
        limit: A size from which on tensors that were half on the tape are taken note of.

    Attributes:
        origins: All origins, in the order in which they were seen.
        at_gradients: The origins of what came to gradients, in the same order.
        too_large: The operators of backward passes that read a gradient of at least the limit.

    Raises:
        CannotRerun: As `Rerun` raises it.
    """

    def __init__(
        self, tape: Tape, in_fp32: Choice = lambda op: False, *, factor: float = 1.0, limit: float = math.inf
    ) -> None:
        super().__init__(tape, in_fp32, factor=factor)
        self._model_inputs = tape.of_kind("input")
        self.origins: list[NonFiniteOrigin] = []
        self.too_large: list[Op] = []
        self._limit = limit
        self._loaded = {event.memory for event in tape.events if isinstance(event, Load)}
        self._flawed: dict[int, NonFiniteOrigin] = {}
        self.at_gradients: list[NonFiniteOrigin] = []
        # Gradients with inf or nan that no operator of a backward pass has read so far.
        self._unread: dict[int, NonFiniteOrigin] = {}
        self._number = 0
        # Casts that were made for an operator, until it takes them.
        self._casts: dict[int, NonFiniteOrigin] = {}
        with undisturbed():
            for op, given, results in self:
                self._after(op, given, results)
        came = dict.fromkeys([*self.at_gradients, *self._unread.values()])
        self.at_gradients = sorted(came, key=lambda origin: origin.number)

    def origin_of(self, ref: Ref | None) -> NonFiniteOrigin | None:
        """Return where the inf or nan in a memory came from at the end of the run; None if it holds none."""
        return None if ref is None else self._flawed.get(ref.memory)

    def before(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of an operator that is about to run."""
        inputs = _read_by(op, args, kwargs)
        found = [(tensor, self._origin(ref, tensor, op)) for ref, tensor in inputs]
        self._came = [origin for _, origin in found if origin is not None]
        self._inputs = inputs
        self._sizes = _largest([tensor for tensor, origin in found if origin is None])
        backward = op.phase == "backward"
        halves = [tensor for ref, tensor in inputs if ref.dtype in HALF_DTYPES]
        if backward and any(size >= self._limit for size in _largest(halves)):
            self.too_large.append(op)
        if op.name == _CHECK:
            self.at_gradients += self._came
        for ref, _ in inputs:
            if backward or op.name == _CHECK:
                self._unread.pop(ref.memory, None)
            if not op.place.is_cast and (made := self._casts.pop(ref.memory, None)) is not None:
                before, taken = made.place, op.place
                made.place = Place(
                    bare_op(op), before.module, taken.location, taken.names, True, taken.in_place, before.classes
                )  # fmt: skip

    def _origin(self, ref: Ref, tensor: Tensor, reader: Op) -> NonFiniteOrigin | None:
        """Return where the inf or nan of an argument came from; None if it holds none."""
        known = self._flawed.get(ref.memory)
        if known is None and ref.memory not in self._loaded:
            return None
        value = nonfinite_value(tensor)
        if value is None:
            return None
        if known is None:
            # A mask that the program made beforehand holds -inf alone, on purpose.
            intended = value == "inf" and not bool(torch.isposinf(tensor).any())
            known = self._flawed[ref.memory] = NonFiniteOrigin(
                None, reader.place, ref, value, self._number, (), intended
            )
            self.origins.append(known)
        return known

    def _after(self, op: Op, given: tuple[list[Any], dict[str, Any]], results: Any) -> None:
        """Follow inf and nan through an operator."""
        self._number += 1
        if (op.is_recorded and results is None) or op.is_empty or op.name == _CHECK:
            return
        changed = written(op.func, op.args, op.kwargs), written(op.func, *given)
        outputs = [*_pairs(*changed), *_pairs(op.outputs, results)]
        read = {ref.memory for ref, _ in self._inputs}
        origins = sorted(self._came, key=lambda origin: (origin.intended, origin.op is None))
        # As in `mask[0] = -math.inf`, of which torch makes a tensor that no operator does.
        is_writer = op.name.partition("::")[2].strip("_") in WRITERS or (
            op.name == "aten::copy_" and any(one.op is None and one.ref.size == () for one in origins)
        )
        origins = [] if is_writer and op.name == "aten::copy_" else origins
        nan_came = any(origin.value == "nan" for origin in self._came)
        for ref, tensor in outputs:
            value = nonfinite_value(tensor)
            if value is None:
                if ref.memory not in read:
                    self._flawed.pop(ref.memory, None)
                continue
            if origins and (not origins[0].intended or value != "nan" or nan_came):
                origin = origins[0]
            elif data := [one for one in origins if one.op is None and one.ref.memory in self._model_inputs]:
                # The operator made nan of an inf in the data, and is not blamed for it.
                origin = replace(data[0], intended=False)
                self.origins.append(origin)
            else:
                intended = is_writer and value != "nan"
                origin = NonFiniteOrigin(op, op.place, ref, value, self._number, self._sizes, intended)
                self.origins.append(origin)
                if op.place.is_cast:
                    self._casts[ref.memory] = origin
            self._flawed[ref.memory] = origin
            if op.phase == "backward":
                self._unread[ref.memory] = origin


@dataclass(frozen=True)
class Errors:
    """How far a step is from fp32; ``str()`` says so. An error is the 2-norm of the difference, as a part of fp32's.

    Attributes:
        parameters: That of each parameter's gradient, but for those that are too small to tell.
        loss: That of the losses.
    """

    parameters: dict[str, float]
    loss: float

    @property
    def gradients(self) -> float:
        """The root of the mean square over the parameters, none of them above 1."""
        squares = [min(error, 1.0) ** 2 for error in self.parameters.values()]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def __str__(self) -> str:
        worst = max(self.parameters, key=self.parameters.__getitem__, default=None)
        of_worst = "" if worst is None else f" (of {worst} by {_percent(self.parameters[worst])})"
        return f"the gradients are off by {self.gradients:.1%}{of_worst} and the loss by {_percent(self.loss)}"


def _percent(error: float) -> str:
    return f"{error:.1%}" if error < 10.0 else "more than 1000%"


def errors_of(run: Rerun, wide: Rerun) -> Errors:
    """Return the errors of a run of a tape beside a run in fp32, both ended."""
    values: dict[str, list[tuple[str, Tensor, Tensor]]] = {"grad": [], "loss": []}
    for one in {one.ref: one for one in run.tape.named if one.kind in values and 0 not in one.ref.size}.values():
        values[one.kind].append((one.name, run.value(one.ref).float(), wide.value(one.ref).float()))
    sizes = {name: float(full.square().mean().sqrt()) for name, _, full in values["grad"]}
    least = _SMALL * max(sizes.values(), default=0.0)
    found = {name: relative_error(half, full) for name, half, full in values["grad"] if sizes[name] > least}
    return Errors(found, max((relative_error(half, full) for _, half, full in values["loss"]), default=0.0))


def _largest(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the largest absolute value of each tensor."""
    return tuple(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in tensors)


def _read_by(op: Op, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Ref, Tensor]]:
    """Return the floating tensors that an operator reads."""
    in_training = op.name in _NORMS and len(op.args) > 5 and op.args[5]
    read = slice(int(op.name in _OVERWRITES), 3 if in_training else None)
    names = [name for name in op.kwargs if name not in writes_of(op.func)]
    refs = *op.args[read], *(op.kwargs[name] for name in names)
    return _pairs(refs, (*args[read], *(kwargs[name] for name in names)))


def _pairs(refs: Any, values: Any) -> list[tuple[Ref, Tensor]]:
    """Return nested references with their floating tensors."""
    return [pair for pair in zip(iter_refs(refs), iter_tensors(values), strict=True) if pair[1].is_floating_point()]
