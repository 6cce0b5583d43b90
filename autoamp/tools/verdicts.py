"""What is found out about a step whose gradients overflowed: verdicts, each a type, and the finding that has one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from autoamp.tools.tables import placed


@dataclass(frozen=True)
class OverflowVerdict:
    """Why a step overflowed. Each of its kinds is a class.

    Attributes:
        kind: The name of the verdict in reports.
    """

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class ScaleSearch(OverflowVerdict):
    """The loss scale is too high as yet, and lower ones do: nothing is wrong, and no list needs to change.

    Attributes:
        finite_at: A loss scale at which the gradients of this step are finite; None where none was tried.
    """

    kind: ClassVar[str] = "scale_search"
    finite_at: float | None = None


@dataclass(frozen=True)
class ScaleTooHigh(ScaleSearch):
    """The loss scale is too high, and does not go lower: it is static, or at the lowest that it may have.

    Attributes:
        finite_at: As for `ScaleSearch`.
    """

    kind: ClassVar[str] = "scale_too_high"


@dataclass(frozen=True)
class HalfPrecisionOp(OverflowVerdict):
    """An op overflows in half precision, at all loss scales; in fp32 it does not.

    Attributes:
        magnitudes: The largest absolute value of each floating tensor that the op got, in its order.
        dtype: The half dtype.
        in_cast: Whether a value was too large for the half dtype before the op began.
    """

    kind: ClassVar[str] = "half_precision_op"
    magnitudes: tuple[float, ...] = ()
    dtype: str = "float16"
    in_cast: bool = False


@dataclass(frozen=True)
class NotFiniteInFp32(OverflowVerdict):
    """In fp32 the step is not finite either: the data or the model is the cause, not the precision.

    Attributes:
        cause: ``"data"``: an input of the model holds inf or nan; ``"weights"``: a parameter or buffer does;
            ``"model"``: the computation makes them out of finite values.
        tensor: The name of the input, parameter or buffer; None for ``"model"``.
        batch_index: The first index along the first dimension of that input at which it is not finite.
        magnitudes: For ``"model"`` as for `HalfPrecisionOp`.
    """

    kind: ClassVar[str] = "not_finite_in_fp32"
    cause: str = "model"
    tensor: str | None = None
    batch_index: int | None = None
    magnitudes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Communication(OverflowVerdict):
    """The gradients of this rank are finite; those that came out of the reduction over ranks are not.

    Those of another rank are not finite either, whose own finding says why, or their sum overflowed.
    """

    kind: ClassVar[str] = "communication"


@dataclass(frozen=True)
class NotLocated(OverflowVerdict):
    """The place was not found.

    Attributes:
        why: What stands in the way.
        watched: How many of the next steps are watched, so that an overflow in them can be located.
        at_any_scale: Whether no search for the loss scale explains it: the loss itself was inf or nan, or its scale
            was 1 or fixed.
    """

    kind: ClassVar[str] = "not_located"
    why: str = ""
    watched: int = 0
    at_any_scale: bool = False


@dataclass(frozen=True)
class Overflow:
    """What is known of one step that overflowed. ``str()`` of it is a sentence.

    Attributes:
        kind: The name of the verdict: ``"scale_search"``, ``"half_precision_op"``, ``"not_finite_in_fp32"``,
            ``"communication"`` or ``"not_located"``.
        verdict: The verdict with its details.
        op: The bare name of the op that first made inf or nan of finite values, as lists have it; None if unknown.
        module: The path within the model of the module that called it; the class of the model for the model itself.
        location: ``"file:line"`` of the program that called it, relative to the working directory if it is below that.
        phase: ``"forward"`` or ``"backward"``.
        parameter: The first parameter whose gradient is not finite.
        iteration: How many calls of ``optimizer.step()`` came before this one, those of all optimizers.
        loss_scale: The scale of the loss.
        suggestion: What to do; for a half-precision op the entry of a list file that avoids it.
        value: ``"inf"`` or ``"nan"``, whichever the op made; ``"nan"`` where it made both.
        fp32_names: For a half-precision op the names that the suggested entry has: those under which it was called,
            such as ``("__mul__", "__rmul__")``. Empty where no such entry helps.
        fp32_module: The class that the suggested entry has under ``[modules]``, such as ``"__main__.Norm"``.
    """

    verdict: OverflowVerdict
    op: str | None = None
    module: str | None = None
    location: str | None = None
    phase: str | None = None
    parameter: str | None = None
    iteration: int | None = None
    loss_scale: float | None = None
    suggestion: str | None = None
    value: str | None = None
    fp32_names: tuple[str, ...] = ()
    fp32_module: str | None = None

    @property
    def kind(self) -> str:
        """The name of the verdict."""
        return self.verdict.kind

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values under the names of the attributes; ``verdict`` is a mapping with its details."""
        # Lists in place of tuples, as JSON has them.
        found: dict[str, Any] = json.loads(json.dumps({"kind": self.kind, **asdict(self)}))
        return {**found, "verdict": {"type": type(self.verdict).__name__, **found["verdict"]}}

    def __str__(self) -> str:
        when = "the step" if self.iteration is None else f"step {self.iteration}"
        at = "" if self.loss_scale is None else f" at loss scale {self.loss_scale:g}"
        remedy = "" if self.suggestion is None else f"; {self.suggestion}"
        return f"{when} overflowed{at}: {self.cause}{remedy}"

    @property
    def cause(self) -> str:
        """The verdict in words, without the step and the remedy."""
        match self.verdict:
            case ScaleSearch(finite_at=scale):
                place = self._place()
                first = f" (first in {place})" if place else ""
                finite = "" if scale is None else f", and at {scale:g} the gradients are finite"
                if isinstance(self.verdict, ScaleTooHigh):
                    return f"the loss scale is too high{first}{finite}"
                return f"the scale is being searched{first}{finite}, which is normal"
            case HalfPrecisionOp(magnitudes=sizes, dtype=dtype, in_cast=in_cast):
                how = f"its input does not fit into {dtype}" if in_cast else f"it overflows in {dtype}"
                return f"{self._made()}: {how}{_sizes(sizes)}, and not in fp32"
            case NotFiniteInFp32(cause="data", tensor=name, batch_index=index):
                row = "" if index is None else f" at batch index {index}"
                return f"the input {name} of {self.module} holds {self.value or 'inf or nan'}{row}"
            case NotFiniteInFp32(cause="weights", tensor=name):
                return f"the parameter or buffer {name} holds {self.value or 'inf or nan'}"
            case NotFiniteInFp32(magnitudes=sizes):
                return f"{self._made()}{_sizes(sizes)}, and in fp32 it is not finite either"
            case Communication():
                return (
                    "the gradients of this rank are finite, and overflowed as they were reduced: another rank tells "
                    "what made inf or nan there, or their sum is too large"
                )
            case NotLocated(why=why, watched=steps):
                watch = f"; watching the next {steps} steps" if steps else ""
                found = f"{self.value} before backward" if self.value else "not located"
                return f"{self._made() if self.op else found}: {why}{watch}"
        return self.kind

    def _made(self) -> str:
        return f"{self._place()} made {self.value or 'inf or nan'}"

    @property
    def place(self) -> tuple[str | None, ...]:
        """The kind, op, module, location, phase, and why there is none: the same in all overflows of one cause."""
        why = self.verdict.why if isinstance(self.verdict, NotLocated) else None
        return self.kind, self.op, self.module, self.location, self.phase, why

    @property
    def is_failure(self) -> bool:
        """Whether the step was wrong: the search for the loss scale does not explain the overflow."""
        if isinstance(self.verdict, NotLocated):
            return self.verdict.at_any_scale
        return type(self.verdict) is not ScaleSearch

    def _place(self) -> str:
        op = f"the backward pass of {self.op}" if self.op and self.phase == "backward" else self.op
        parameter = f" (parameter {self.parameter})" if self.parameter else ""
        return f"{placed(op or '', self.module, self.location)}{parameter}".lstrip()


def _sizes(sizes: tuple[float, ...]) -> str:
    return f" from magnitudes {', '.join(f'{size:.3g}' for size in sizes)}" if sizes else ""
