"""Where users look already: scalars for TensorBoard and Weights & Biases, and what follows landed steps alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from autoamp.errors import UsageError

__all__ = ["Followers", "write_scalars"]


class Followers:
    """Called after each step of an optimizer, once weights are as the step left them.

    Attributes:
        after_all: Called after every step, skips included.
        after_landed: Called after steps that were taken.
    """

    def __init__(self) -> None:
        self.after_all: list[Callable[[], object]] = []
        self.after_landed: list[Callable[[], object]] = []

    def follow(self, followers: Sequence[Any]) -> Callable[[], None]:
        """Let these step on landed steps; return what ends that.

        Raises:
            UsageError: One of them is neither callable nor has ``step()`` or ``update()``, or needs arguments.
        """
        found = [_stepping(one) for one in followers]
        self.after_landed += found

        def end() -> None:
            for one in found:
                with contextlib.suppress(ValueError):
                    self.after_landed.remove(one)
            found.clear()

        return end

    def forget(self, call: Callable[[], object]) -> None:
        """Call one of ``after_all`` no more. Does nothing the second time."""
        with contextlib.suppress(ValueError):
            self.after_all.remove(call)

    def stepped(self, skipped: Callable[[], bool]) -> None:
        """Hear that an optimizer's step has ended."""
        if self.after_landed and not skipped():
            for one in list(self.after_landed):
                one()
        for one in list(self.after_all):
            one()


def _stepping(follower: Any) -> Callable[[], object]:
    name = next((name for name in ("step", "update") if callable(getattr(follower, name, None))), None)
    method = follower if name is None else getattr(follower, name)
    # A model is called to compute something, as is that of torch's AveragedModel.
    if not callable(method) or (name is None and isinstance(follower, Module)):
        raise UsageError(
            f"follow() cannot step a {type(follower).__name__}; give an object with step() or update(), or a function "
            "such as lambda: averaged.update_parameters(model)"
        )
    try:
        inspect.signature(method).bind()
    except TypeError as error:
        called = type(follower).__name__ if name is None else f"{type(follower).__name__}.{name}"
        raise UsageError(
            f"follow() calls {called}() with no arguments ({error}); give a function that has them, such as "
            "lambda: ema.update(model)"
        ) from None
    except ValueError:
        # What is written in C may not tell.
        pass
    return method  # type: ignore[no-any-return]


def write_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write numbers to a `SummaryWriter` (``add_scalar``), or to a run of Weights & Biases (``log``).

    Args:
        writer: Either of them.
        values: Numbers by name; they are written as ``autoamp/NAME``.
        step: The number of the step.

    Raises:
        UsageError: It is neither.
    """
    if callable(getattr(writer, "add_scalar", None)):
        for name, value in values.items():
            writer.add_scalar(f"autoamp/{name}", value, step)
    elif callable(getattr(writer, "log", None)):
        writer.log({f"autoamp/{name}": value for name, value in values.items()})
    else:
        raise UsageError(
            f"log_to() cannot write to a {type(writer).__name__}; give an object with add_scalar() or log()"
        )
