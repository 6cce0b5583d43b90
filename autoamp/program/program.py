"""The subscribers of one handle: torch is patched for what they hear, and they are told."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from autoamp.patching import PatchSet, imitate, original_of, writing
from autoamp.program.events import Subscriber
from autoamp.program.points import LATE_MODULES, Point, StepPatches, points

P = ParamSpec("P")
R = TypeVar("R")


class Program:
    """What the program does, heard from `patch` to `restore`. Without subscribers nothing is patched."""

    def __init__(self) -> None:
        self.subscribers: Sequence[Subscriber] = ()
        self._hears: dict[str, list[Callable[..., Any]]] = {}
        self._steps: StepPatches | None = None
        # The points that `patch` found heard, None where torch is not patched; the patches of those that `update` did.
        self._patched: set[tuple[int, str | None]] | None = None
        self._later = PatchSet()

    def subscribe(self, *subscribers: Subscriber) -> None:
        """Tell these from now on, in this order, and those before no more. Torch is not patched meanwhile."""
        self.subscribers = subscribers
        self._hears = {
            event: [getattr(one, event) for one in subscribers if _overrides(one, event)] for event in vars(Subscriber)
        }

    def tell(self, event: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Tell all subscribers of an event, which is a method of `Subscriber`, and return what they answer."""
        return [hear(*args, **kwargs) for hear in self._hears.get(event.__name__, ())]

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
        self._patched = set()
        if around := self._hears.get("around_step"):
            self._steps = StepPatches(around, patches)
        for point in points():
            if self._is_heard(point):
                self._patched.add((id(point.owner), point.name))
                replaced |= self._hear(point, patches)
        for name in LATE_MODULES:
            patches.when_imported(name, lambda _: self.update())
        for owner, name, build in functions:
            replaced |= _replace(owner, name, build, patches)
        return replaced

    def update(self) -> None:
        """Patch torch for subscribers that began to listen, and restore what only those heard that stopped."""
        with writing:
            self._later.restore()
            if self._patched is not None:
                with self._later.all_or_nothing():
                    for point in points():
                        if (id(point.owner), point.name) not in self._patched and self._is_heard(point):
                            self._hear(point, self._later)

    def restore(self) -> None:
        """Restore what is not in the patches that `patch` was given."""
        # Another thread may be within `update`.
        with writing:
            self._patched = None
            if self._steps is not None:
                self._steps.restore()
                self._steps = None
            self._later.restore()

    def _is_heard(self, point: Point) -> bool:
        if point.owner is None or point.name is None:
            # This torch has no such thing; `torch_private` says what goes without.
            return False
        if point.event is Subscriber.optimizer_made and self._steps is not None:
            # Told to `_class_made`.
            return True
        hears: list[Any] = self._hears[point.event.__name__]
        return any(hear.__self__.is_listening for hear in hears)

    def _hear(self, point: Point, patches: PatchSet) -> dict[int, tuple[Any, Any]]:
        hears = self._hears[point.event.__name__]
        if point.event is Subscriber.optimizer_made:
            hears = [self._class_made, *hears]
        return _replace(point.owner, str(point.name), lambda original: point.build(original, hears), patches)

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
