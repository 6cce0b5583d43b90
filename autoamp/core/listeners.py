"""The one socket for what looks on: a `Listener` of a handle, and the listeners that it has now.

Nothing is called, kept or patched for an event that no listener wants. A clean step of a program that asked for nothing
has no listener of any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, SupportsFloat

from torch import Tensor
from torch.nn import Module


class Cause(Protocol):
    """What explains a step, as errors and warnings show it."""

    @property
    def cause(self) -> str:
        """What made inf or nan, in words."""

    @property
    def suggestion(self) -> str | None:
        """What to do."""

    @property
    def place(self) -> tuple[str | None, ...]:
        """The same for all steps of one cause."""


class Listener:
    """Looks on while a program runs, and changes nothing. A subclass overrides the events that it wants.

    The methods of this class are never called.
    """

    def call_begun(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], object] | None:
        """A call of a module begins. Returns what is called with its outputs, or with None if it raised."""
        raise NotImplementedError

    def module_layer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Torch is patched. Returns what takes the place of the replacement of ``torch.nn.Module.__call__``."""
        raise NotImplementedError

    def op_layer(self, replacement: Any, target: Any, in_half_models: bool) -> Any:
        """Torch is patched. Returns what takes the place of the replacement of an `autoamp.core.Target`.

        Args:
            replacement: A function, staticmethod or classmethod.
            target: What it replaces.
            in_half_models: Whether its rule acts inside half models, and nowhere else.
        """
        raise NotImplementedError

    def loss_scaled(self, loss: Tensor, scale: SupportsFloat) -> None:
        """The backward pass of a loss is about to run: of one that is not scaled too, with the scale 1.0.

        Args:
            loss: The loss before it is multiplied, usually a scalar.
            scale: The scale, which may be known to the device alone.
        """

    def backward_begun(self, given: Any) -> AbstractContextManager[Any]:
        """A backward pass begins, by these gradients or by 1. Returns the context in which it runs."""
        raise NotImplementedError

    def export_begun(self) -> AbstractContextManager[Any]:
        """`torch.jit.trace` or `torch.export` is about to make a graph. Returns the context in which it does."""
        raise NotImplementedError

    def step_begun(self) -> bool:
        """An optimizer was called. Returns whether the host is to learn at once what becomes of the step."""
        raise NotImplementedError

    def step_taken(self, history: Any, step: Any) -> None:
        """It is known that a step was taken; see `step_skipped`."""

    def step_skipped(self, history: Any, step: Any) -> Any:
        """It is known that a loss scale skipped a step. Returns what explains it; None for no explanation.

        Args:
            history: The `autoamp.core.StepHistory` of the optimizer.
            step: The `autoamp.core.Step`. Others may have been taken since.
        """

    def step_nonfinite(self, number: int, *, late: bool) -> Any:
        """A step that no loss scale guards has inf or nan in its gradients or its loss. Returns what explains it.

        Args:
            number: How many steps came before it.
            late: Whether it was taken earlier. Else it is about to be taken or skipped.
        """

    def step_ended(self, step: Any) -> None:
        """A step was taken or skipped, as its `autoamp.core.Step` tells."""

    def closed(self) -> None:
        """Torch is about to be restored, for a while or for good."""


class Listeners:
    """The listeners of one handle, by event: what a listener does not override is not called for it."""

    call_begun: Sequence[Callable[..., Any]]
    module_layer: Sequence[Callable[..., Any]]
    op_layer: Sequence[Callable[..., Any]]
    loss_scaled: Sequence[Callable[..., Any]]
    backward_begun: Sequence[Callable[..., Any]]
    export_begun: Sequence[Callable[..., Any]]
    step_begun: Sequence[Callable[..., Any]]
    step_taken: Sequence[Callable[..., Any]]
    step_skipped: Sequence[Callable[..., Any]]
    step_nonfinite: Sequence[Callable[..., Any]]
    step_ended: Sequence[Callable[..., Any]]
    closed: Sequence[Callable[..., Any]]

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()
        self._sort()

    def add(self, listener: Listener) -> None:
        """Tell a listener from now on, after those before it. One that is told already stays where it is."""
        if listener not in self._all:
            self._all = (*self._all, listener)
            self._sort()

    def remove(self, listener: Listener) -> None:
        """Tell a listener no more. Does nothing if it is not told."""
        self._all = tuple(other for other in self._all if other is not listener)
        self._sort()

    def _sort(self) -> None:
        for event in Listeners.__annotations__:
            base = getattr(Listener, event)
            setattr(
                self, event, tuple(getattr(one, event) for one in self._all if getattr(type(one), event) is not base)
            )
