"""Attributes that are replaced, one by one or as a set, and put back exactly as they were.

A replacement bears a mark that names its original, and the original's name and signature. It is a plain function and
not a wrapt proxy: `torch.compile` takes a proxy over a builtin for the builtin, and drops what the proxy adds.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from autoamp.errors import PatchError
from autoamp.torch_private import disabled_by_dynamo

log = logging.getLogger(__name__)

_ABSENT: Any = object()

writing = threading.RLock()
"""Held by the one thread that writes patches: they are written to objects that the whole process shares."""

_MARK = "__autoamp_original__"
_MARKED_TYPES = (types.FunctionType, staticmethod, classmethod)


@dataclass(slots=True)
class _Mark:
    """A note on a replacement.

    Attributes:
        original: What it replaces.
        bearer: The ``id`` of the replacement. On another function the mark is a copy, as `functools.wraps` makes it.
        alive: Whether it is in place, from `PatchSet.replace` until its set takes it back.
    """

    original: Any
    bearer: int
    alive: bool = False


def mark(replacement: Any, original: Any) -> Any:
    """Mark a function, staticmethod or classmethod as the replacement of ``original``, and return it."""
    setattr(replacement, _MARK, _Mark(original, id(replacement)))
    return replacement


def original_of(value: Any) -> Any:
    """Return what a replacement of ours replaces, below all replacements; anything else is returned as it is."""
    while type(value) in _MARKED_TYPES:
        found = vars(value).get(_MARK)
        if found is None or found.bearer != id(value):
            break
        value = found.original
    return value


def mark_of(value: Any) -> _Mark | None:
    """Return the mark of a replacement; None for anything else, such as a function that a mark was copied to."""
    found = vars(value).get(_MARK) if type(value) in _MARKED_TYPES else None
    return found if found is not None and found.bearer == id(value) else None


def imitate(
    replacement: Callable[..., Any], original: Any, module: str | None = None, qualname: str | None = None
) -> Any:
    """Give a replacement the original's name, docstring and signature, mark it with the original, and return it.

    Args:
        replacement: A function that is no other's replacement.
        original: What it replaces.
        module: The module by which a replacement of a builtin is pickled; by default the original's own. For an
            original that is written in Python it is always that.
        qualname: Its name in that module, by default the original's own.
    """
    functools.update_wrapper(replacement, original, assigned=("__doc__", "__name__"), updated=())
    if isinstance(original, types.FunctionType):
        module = qualname = None
    replacement.__module__ = original.__module__ if module is None else module
    replacement.__qualname__ = original.__qualname__ if qualname is None else qualname
    return mark(replacement, original)


def name_by(replacement: Any, module: str, qualname: str) -> None:
    """Let a replacement be pickled by ``module`` and ``qualname``, unless its present names lead to it already."""
    if isinstance(replacement, types.FunctionType):
        found: Any = sys.modules.get(replacement.__module__)
        for part in replacement.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not replacement:
            replacement.__module__, replacement.__qualname__ = module, qualname


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A replacement for one attribute of one object, and what was there before.

    Attributes:
        parent: The module, class or object that is written to.
        attribute: The attribute's name.
        replacement: What is put there.
        previous: What ``vars(parent)`` has under that name once the patch is restored; a sentinel for nothing, where
            the attribute is inherited.
        rebinds: Whether it is a name of another module, by `PatchSet.rebind`.
        mark: The note on the replacement, if it bears one.
    """

    parent: Any
    attribute: str
    replacement: Any
    previous: Any
    rebinds: bool = False
    mark: _Mark | None = None

    @classmethod
    def from_attribute(cls, parent: Any, attribute: str, replacement: Any, rebinds: bool = False) -> Patch:
        """Make a patch without applying it. PatchError where the parent has no attributes of its own."""
        try:
            previous = found = vars(parent).get(attribute, _ABSENT)
        except TypeError as error:
            raise PatchError(f"{type(parent).__name__}.{attribute} cannot be replaced: {error}") from error
        if type(found) not in _MARKED_TYPES:
            return cls(parent, attribute, replacement, previous, rebinds, mark_of(replacement))
        # What is below the replacements whose sets were restored.
        while (marked := mark_of(previous)) is not None and not marked.alive:
            previous = marked.original
        # A replacement of a restored set, put back by somebody who had patched on top of it, may replace an inherited
        # attribute.
        if previous is not found and _inherited(parent, attribute) is previous:
            previous = _ABSENT
        return cls(parent, attribute, replacement, previous, rebinds, mark_of(replacement))

    @property
    def name(self) -> str:
        """The dotted name of the patched attribute."""
        return f"{getattr(self.parent, '__name__', type(self.parent).__name__)}.{self.attribute}"

    def apply(self) -> None:
        """Write the replacement. PatchError where the attribute cannot be written."""
        try:
            wrapt.apply_patch(self.parent, self.attribute, self.replacement)
        except (AttributeError, TypeError) as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> PatchError:
        """Return the error of an attribute that cannot be written."""
        return PatchError(f"{self.name} cannot be replaced: {error}")

    def restore(self) -> bool:
        """Put back what was there. Return False, and change nothing, where the attribute has another value by now."""
        found = vars(self.parent).get(self.attribute, _ABSENT)
        if found is not self.replacement:
            if self.previous is _ABSENT or disabled_by_dynamo(found) is not self.replacement:
                return False
            # The first call of torch.compile has disabled the replacement, as it would have disabled what was there.
            setattr(self.parent, self.attribute, torch.compiler.disable(self.previous))
        elif self.previous is _ABSENT:
            # Writing the inherited value would hide later changes of the attribute of the base class.
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.previous)
        return True


def _inherited(parent: Any, attribute: str) -> Any:
    """Return what a parent inherits under a name, as it stands in the base class; a sentinel for nothing."""
    mro = parent.__mro__[1:] if isinstance(parent, type) else type(parent).__mro__
    return next((vars(base)[attribute] for base in mro if attribute in vars(base)), _ABSENT)


def check_writable(parent: Any, attribute: str) -> None:
    """Raise PatchError where an attribute cannot be replaced: it is written with the value that it has already."""
    with writing:
        # Of a class the descriptor; of an object what its attribute is, which another thread may call meanwhile.
        find = inspect.getattr_static if isinstance(parent, type) else getattr
        patch = Patch.from_attribute(parent, attribute, find(parent, attribute, None))
        patch.apply()
        if patch.previous is _ABSENT:
            patch.restore()


_waiting: dict[str, list[tuple[PatchSet, Callable[[types.ModuleType], None]]]] = {}
"""Who waits for the import of a module, by its name. wrapt cannot take a hook back, so a module has one at a time."""


def _call_back(module_name: str, module: types.ModuleType) -> None:
    """Call those who wait for a module, which was imported."""
    with writing:
        for _, callback in _waiting.pop(module_name, ()):
            callback(module)


class PatchSet:
    """Patches that are applied one after the other and restored together, in reverse order."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """The dotted names that `rebind` replaced."""
        return tuple(patch.name for patch in self if patch.rebinds)

    def replace(self, parent: Any, attribute: str, replacement: Any, rebinds: bool = False) -> None:
        """Apply one patch and remember it. PatchError where the attribute cannot be written."""
        patch = Patch.from_attribute(parent, attribute, replacement, rebinds)
        # `Patch.apply` written out: hundreds are put in place at once.
        try:
            wrapt.apply_patch(parent, attribute, replacement)
        except (AttributeError, TypeError) as error:
            raise patch.refused(error) from error
        self._patches.append(patch)
        if patch.mark is not None:
            patch.mark.alive = True

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Let no other thread patch within the ``with`` statement, and take its patches back if it raises."""
        with writing:
            count = len(self._patches)
            try:
                yield
            except BaseException:
                self._take_back(count)
                raise

    def rebind(self, replacements: Mapping[int, tuple[Any, Any]], skip: Callable[[str], bool]) -> None:
        """Rebind names that other modules took by ``from ... import ...`` before the patches came.

        Args:
            replacements: ``id(original) -> (original, replacement)``.
            skip: Tells by a module's name whether that module is to be left alone.
        """
        for module, attribute, value in _module_globals(replacements, skip):
            self.replace(module, attribute, replacements[id(value)][1], rebinds=True)

    def restore(self) -> tuple[str, ...]:
        """Restore all patches in reverse order, and forget who waits for imports.

        Returns:
            The dotted names that somebody else patched after this set. They are left as they are, with our replacement
            below, which passes calls through once its handle is not active.
        """
        with writing:
            for module_name, waiting in _waiting.items():
                _waiting[module_name] = [one for one in waiting if one[0] is not self]
            replacements = {id(patch.replacement): patch.replacement for patch in self}
            foreign = self._take_back(0)
            # Modules that were imported meanwhile may have taken replacements by `from ... import ...`.
            for module, attribute, value in _module_globals(replacements, lambda _: False):
                setattr(module, attribute, original_of(value))
        if foreign:
            log.warning("not restored, because another library patched them after autoamp: %s", ", ".join(foreign))
        return foreign

    def _take_back(self, count: int) -> tuple[str, ...]:
        """Restore all patches but the first ``count``; return the names that could not be."""
        taken: list[Patch] = []
        foreign = []
        while len(self._patches) > count:
            patch = self._patches.pop()
            taken.append(patch)
            if not patch.restore():
                foreign.append(patch.name)
        # One replacement may stand in several places, of which some stay.
        in_place = {id(patch.replacement) for patch in self}
        for one in taken:
            if one.mark is not None and id(one.replacement) not in in_place:
                one.mark.alive = False
        return tuple(dict.fromkeys(foreign))

    def when_imported(self, module_name: str, callback: Callable[[types.ModuleType], None]) -> None:
        """Call ``callback(module)`` once ``module_name`` is imported, unless this set is restored before.

        A module that is imported already is not imported again, so for it nothing is called.
        """
        with writing:
            if module_name in sys.modules:
                return
            if module_name not in _waiting:
                wrapt.register_post_import_hook(functools.partial(_call_back, module_name), module_name)
            _waiting.setdefault(module_name, []).append((self, callback))


def _module_globals(wanted: Mapping[int, Any], skip: Callable[[str], bool]) -> list[tuple[types.ModuleType, str, Any]]:
    """Find the globals of imported modules that are among some objects.

    Args:
        wanted: The objects, by ``id(object)``.
        skip: Tells by a module's name whether that module is to be left out.

    Returns:
        For each its module, the name of the global and the object.
    """
    found: list[tuple[types.ModuleType, str, Any]] = []
    if not wanted:
        return found
    for name, module in list(sys.modules.items()):
        # Some programs keep other things than modules in sys.modules; their attributes may be computed.
        if not isinstance(module, types.ModuleType) or skip(name):
            continue
        names = vars(module).copy()
        # Most modules have none, and a large program has hundreds of thousands of globals: one set operation tells.
        if not wanted.keys().isdisjoint(map(id, names.values())):
            found += [(module, attribute, value) for attribute, value in names.items() if id(value) in wanted]
    return found
