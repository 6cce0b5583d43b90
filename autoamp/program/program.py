"""The subscribers of one handle: torch is patched for what they hear, and they are told."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec

from autoamp.patching import PatchSet, imitate, original_of
from autoamp.program.events import ORDER, Subscriber
from autoamp.program.points import LATE_POINTS, Point, points
from autoamp.program.steps import StepPatches

__all__ = ["Program"]

P = ParamSpec("P")


class Program:
    """What the program does, heard from `patch` to `restore`. Without subscribers nothing is patched."""

    def __init__(self) -> None:
        self._subscribers: Sequence[Subscriber] = ()
        self._hears: dict[str, list[Callable[..., Any]]] = {}
        self._steps: StepPatches | None = None
        # The points that `patch` found heard, and the patches of those that `update` did.
        self._patched: set[tuple[int, str | None]] = set()
        self._later = PatchSet()

    def subscribe(self, *subscribers: Subscriber) -> None:
        """Tell these from now on, and those before no more. Torch is not patched meanwhile."""
        self._subscribers = sorted(subscribers, key=lambda one: ORDER.index(_class_in_order(one)))
        self._hears = {}

    def hears(self, event: str) -> list[Callable[..., Any]]:
        """Return the methods of all subscribers that override one of `Subscriber`, in their order."""
        if event not in self._hears:
            self._hears[event] = [getattr(one, event) for one in self._subscribers if _overrides(one, event)]
        return self._hears[event]

    def tell(self, event: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell all subscribers of an event, which is a method of `Subscriber`."""
        for hear in self.hears(event.__name__):
            hear(*args, **kwargs)

    def asks(self, event: Callable[Concatenate[Any, P], bool], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Ask all subscribers whether to do something. Returns whether one of them wants it."""
        return any(hear(*args, **kwargs) for hear in self.hears(event.__name__))

    # -- patches --

    def patch(
        self, patches: PatchSet, functions: Iterable[tuple[Any, str, Callable[[Any], Any]]]
    ) -> dict[int, tuple[Any, Any]]:
        """Patch torch for all subscribers that listen.

        Args:
            patches: Take the replacements, and are restored after `restore`.
            functions: What else to replace: the owner, the attribute, and what builds the replacement.

        Returns:
            ``id(original) -> (original, replacement)`` of the functions of modules, which programs may hold by name.
        """
        replaced: dict[int, tuple[Any, Any]] = {}
        for point in points():
            if self._is_heard(point):
                self._patched.add((id(point.owner), point.name))
                replaced |= self._hear(point, patches)
        for module_name, late_point in LATE_POINTS.items():
            hear_late = functools.partial(self._hear_late, late_point, patches)
            if module_name in sys.modules:
                hear_late(sys.modules[module_name])
            else:
                patches.when_imported(module_name, hear_late)
        around = self.hears("around_step")
        if around:
            self._steps = StepPatches(around, patches)
        for owner, name, build in functions:
            replaced |= _replace(owner, name, build, patches)
        return replaced

    def update(self) -> None:
        """Patch torch for subscribers that began to listen, and restore what only those heard that stopped."""
        self._later.restore()
        if self._patched:
            with self._later.all_or_nothing():
                for point in points():
                    if (id(point.owner), point.name) not in self._patched and self._is_heard(point):
                        self._hear(point, self._later)

    def restore(self) -> None:
        """Restore what is not in the patches that `patch` was given."""
        self._patched.clear()
        if self._steps is not None:
            self._steps.restore()
            self._steps = None
        self._later.restore()

    def _is_heard(self, point: Point) -> bool:
        if point.owner is None or point.name is None:
            # This torch has no such thing; `torch_private` says what goes without.
            return False
        return any(one.is_listening for one in self._subscribers if _overrides(one, point.event.__name__))

    def _hear(self, point: Point, patches: PatchSet) -> dict[int, tuple[Any, Any]]:
        event = point.event.__name__
        hears: list[Callable[..., Any]] = self.hears(event)
        if event == "optimizer_made":
            hears = [self._class_made, *hears]
        return _replace(point.owner, str(point.name), lambda original: point.build(original, hears), patches)

    def _hear_late(self, point_of: Callable[[Any], Point], patches: PatchSet, module: types.ModuleType) -> None:
        self._hear(point_of(module), patches)

    def _class_made(self, optimizer: Any) -> None:
        """Replace the step of a class of which this is the first instance."""
        if self._steps is not None:
            self._steps.reach(type(optimizer))


def _replace(owner: Any, name: str, build: Callable[[Any], Any], patches: PatchSet) -> dict[int, tuple[Any, Any]]:
    """Replace an attribute by what is built of it. Returns ``id(original) -> both``; nothing for a method."""
    # Some are inherited: Tensor has them from its base.
    original = original_of(inspect.getattr_static(owner, name))
    replacement = build(original)
    if replacement is original:
        return {}
    is_module = isinstance(owner, types.ModuleType)
    if original_of(replacement) is replacement and not isinstance(replacement, staticmethod):
        module, qualname = (owner.__name__, name) if is_module else (owner.__module__, f"{owner.__name__}.{name}")
        imitate(replacement, original, module, qualname)
    patches.replace(owner, name, replacement)
    return {id(original): (original, replacement)} if is_module else {}


def _overrides(subscriber: Subscriber, event: str) -> bool:
    return getattr(type(subscriber), event) is not getattr(Subscriber, event)


def _class_in_order(subscriber: Subscriber) -> str:
    return next(kind.__name__ for kind in type(subscriber).__mro__ if kind.__name__ in ORDER)
