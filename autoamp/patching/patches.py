"""A set of replaced attributes, which is put back exactly."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import wrapt

from autoamp.errors import PatchError
from autoamp.patching.imports import watcher, writing
from autoamp.patching.marks import below_restored, mark_of, original_of

__all__ = ["Patch", "PatchSet", "check_writable"]

log = logging.getLogger(__name__)
"""The attribute of a replacement in which `offer_shortcut` keeps a pair: its bearer, and what to call in its place.

Who reads it compares the bearer, since `functools.wraps` copies a function's attributes. Where that is done for each
call, the two lines are written there: a function for them would be one more Python frame.
"""


_ABSENT: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """One attribute of one object and what it was before.

    Attributes:
        parent: The module, class or object that is written to.
        attribute: The attribute's name.
        replacement: What is put there.
        previous: What ``vars(parent)`` is to hold afterwards, or a sentinel where the attribute is inherited.
    """

    parent: Any
    attribute: str
    replacement: Any
    previous: Any

    @classmethod
    def of(cls, parent: Any, attribute: str, replacement: Any) -> Patch:
        """Describe a patch without applying it. PatchError where the parent has no attributes of its own."""
        try:
            held = vars(parent).get(attribute, _ABSENT)
        except TypeError as error:
            raise PatchError(f"{_name(parent, attribute)} cannot be replaced: {error}") from error
        previous = below_restored(held)
        # What outlived its set, under a patch of somebody else, may have stood in for an inherited attribute.
        if previous is not held and _inherited(parent, attribute) is previous:
            previous = _ABSENT
        return cls(parent, attribute, replacement, previous)

    @property
    def name(self) -> str:
        """The dotted name of the patched attribute."""
        return _name(self.parent, self.attribute)

    def apply(self) -> None:
        """Write the replacement. PatchError where the attribute cannot be written."""
        try:
            wrapt.apply_patch(self.parent, self.attribute, self.replacement)
        except (AttributeError, TypeError) as error:
            raise PatchError(f"{self.name} cannot be replaced: {error}") from error

    def restore(self) -> bool:
        """Put back what was there. Return False, and change nothing, where somebody patched above this patch."""
        if vars(self.parent).get(self.attribute, _ABSENT) is not self.replacement:
            return False
        if self.previous is _ABSENT:
            # Writing an inherited attribute back would leave a shadow of it on the subclass.
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.previous)
        return True


def _name(parent: Any, attribute: str) -> str:
    return f"{getattr(parent, '__name__', type(parent).__name__)}.{attribute}"


def _inherited(parent: Any, attribute: str) -> Any:
    """What lookup finds above the parent's own attributes."""
    mro = parent.__mro__[1:] if isinstance(parent, type) else type(parent).__mro__
    return next((vars(base)[attribute] for base in mro if attribute in vars(base)), _ABSENT)


def check_writable(parent: Any, attribute: str) -> None:
    """Raise PatchError where an attribute cannot be replaced. Tries it with what is there already."""
    with writing:
        patch = Patch.of(parent, attribute, None)
        held = vars(parent).get(attribute, _ABSENT)
        if held is _ABSENT:
            held = _inherited(parent, attribute) if isinstance(parent, type) else getattr(parent, attribute)
        patch = replace(patch, replacement=held)
        patch.apply()
        if patch.previous is _ABSENT:
            patch.restore()


class PatchSet:
    """Patches applied together and restored together, in reverse order."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self.late_bound: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._patches)

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches)

    def replace(self, parent: Any, attribute: str, replacement: Any) -> None:
        """Apply one patch and remember it. PatchError where the attribute cannot be written."""
        patch = Patch.of(parent, attribute, replacement)
        patch.apply()
        self._patches.append(patch)
        found = mark_of(replacement)
        if found is not None:
            found.alive = True

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Keep other threads from patching for a block, and take its patches back where it fails."""
        with writing:
            count, late_bound = len(self._patches), self.late_bound
            try:
                yield
            except BaseException:
                self._take_back(count)
                self.late_bound = late_bound
                raise

    def rebind(self, replacements: Mapping[int, tuple[Any, Any]], skip: Callable[[str], bool]) -> None:
        """Rebind names that other modules took by ``from ... import ...`` before the patches came.

        Args:
            replacements: ``id(original) -> (original, replacement)``.
            skip: Given a module's name, tells whether that module is to be left alone.
        """
        found = []
        for name, module, attribute, value in _module_globals(replacements, skip):
            self.replace(module, attribute, replacements[id(value)][1])
            found.append(f"{name}.{attribute}")
        self.late_bound += tuple(found)

    def restore(self) -> tuple[str, ...]:
        """Restore everything in reverse order.

        Returns:
            The names that somebody else patched on top of ours. They are left as they are; what they wrap is a
            replacement of ours, which passes calls through once its handle is not active.
        """
        with writing:
            watcher.forget(self)
            marked = {id(patch.replacement): (patch.replacement, mark_of(patch.replacement)) for patch in self}
            foreign = self._take_back(0)
            # A module imported while the patches stood has taken replacements under names of its own.
            for _, module, attribute, value in _module_globals(marked, lambda _: False):
                setattr(module, attribute, original_of(value))
            for _, found in marked.values():
                if found is not None:
                    found.alive = False
            self.late_bound = ()
        if foreign:
            log.warning("patched by others on top of autoamp, left as they are: %s", ", ".join(foreign))
        return foreign

    def _take_back(self, count: int) -> tuple[str, ...]:
        """Restore all patches but the first ``count``; return the names that could not be."""
        foreign = []
        while len(self._patches) > count:
            patch = self._patches.pop()
            if not patch.restore():
                foreign.append(patch.name)
        return tuple(dict.fromkeys(foreign))

    def when_imported(self, module_name: str, callback: Callable[[types.ModuleType], None]) -> None:
        """Call ``callback(module)`` once ``module_name`` is imported, unless this set is restored before.

        For a module that is imported already nothing is called.
        """
        watcher.listen(module_name, self, callback)


def _module_globals(
    wanted: Mapping[int, Any], skip: Callable[[str], bool]
) -> list[tuple[str, types.ModuleType, str, Any]]:
    """Find the module globals that are one of the objects ``wanted`` (by id)."""
    found = []
    for name, module in list(sys.modules.items()):
        # Some programs keep other things than modules in sys.modules; their attributes may be computed.
        if not isinstance(module, types.ModuleType) or skip(name):
            continue
        names = vars(module).copy()
        # Most modules hold none: told in one sweep, since a large program has hundreds of thousands of globals.
        if not wanted.keys().isdisjoint(map(id, names.values())):
            found += [(name, module, attribute, value) for attribute, value in names.items() if id(value) in wanted]
    return found
