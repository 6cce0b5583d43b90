"""Precisions of single modules: what lists and `handle.override()` say of them."""

from __future__ import annotations

import difflib
import fnmatch
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from torch.nn import Module

from autoamp.errors import PatchError, UsageError, warn_user
from autoamp.modules.tags import TAGS, ModuleTags
from autoamp.patching import resolve
from autoamp.rules import ModulePrecision, ModuleRule

__all__ = ["ModulePrecisions", "Override"]

_GLOB = frozenset("*?[")


class Override:
    """Modules that run in a precision of their own until ``undo()``, or until the end of a ``with`` statement.

    Args:
        tags: Where the precisions are noted.
        precisions: The precision of each module; None lets it run as the list says.
        undone: Called by `undo`, with this object.
    """

    def __init__(
        self,
        tags: ModuleTags[ModulePrecision | None],
        precisions: Mapping[Module, ModulePrecision | None],
        undone: Callable[[Override], None],
    ) -> None:
        self._tags = tags
        self._tagged = [(weakref.ref(module), tags.give(module, given)) for module, given in precisions.items()]
        self._undone = undone

    def undo(self) -> None:
        """Give every module back what it had, in whatever order overrides are undone. Calling it twice does no harm."""
        while self._tagged:
            reference, tag = self._tagged.pop()
            self._tags.take(tag, reference())
        self._undone(self)

    def modules(self) -> Iterator[Module]:
        """Yield the modules that are left of those that were given a precision."""
        for reference, _ in self._tagged:
            module = reference()
            if module is not None:
                yield module

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


class ModulePrecisions:
    """Which modules run in a precision of their own: by class from the list, by instance through `Override`.

    Attributes:
        any: Whether there may be such a module: false spares a question at each call.
    """

    def __init__(self, rules: Iterable[ModuleRule]) -> None:
        self._rules = tuple(rules)
        self._class_rules = tuple(
            rule for rule in self._rules if "." in rule.pattern and not _GLOB.intersection(rule.pattern)
        )
        self._by_class: weakref.WeakKeyDictionary[type, ModulePrecision | None] = weakref.WeakKeyDictionary()
        self._tags: ModuleTags[ModulePrecision | None] = ModuleTags()
        self._overrides: set[Override] = set()
        self.any = bool(self._class_rules)

    def of(self, module: Module) -> ModulePrecision | None:
        """Return the precision a module was given, None where it runs as the list says."""
        if TAGS in module.__dict__:
            tag = self._tags.find(module)
            if tag is not None:
                return self._tags.values[tag]
        return self._of_class(type(module)) if self._class_rules else None

    def override(self, module: Module, precision: str) -> Override:
        """Give one module, with all it calls, a precision.

        Raises:
            UsageError: The precision is none of ``"fp32"``, ``"fp16"`` and ``"none"``.
        """
        return self._override({module: _precision(precision)})

    def override_paths(self, model: Module) -> Override:
        """Give the submodules of ``model`` what the list's path patterns say, the later pattern over the earlier."""
        names = dict(model.named_modules())
        chosen: dict[str, ModulePrecision | None] = {}
        for rule in self._rules:
            matched = fnmatch.filter(names, rule.pattern)
            chosen.update(dict.fromkeys(matched, _listed(rule)))
            if not matched and not self._names_a_class(rule, names.values()):
                near = difflib.get_close_matches(rule.pattern, names, n=3)
                warn_user(
                    f"{rule.origin}: {rule.pattern!r} matches no module of {type(model).__name__}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                )
        return self._override({names[name]: precision for name, precision in chosen.items()})

    def undo_all(self) -> None:
        """Undo every override that still stands."""
        for override in list(self._overrides):
            override.undo()

    def undo_within(self, modules: Container[Module]) -> None:
        """Undo the overrides that are about one of these modules."""
        for override in list(self._overrides):
            if any(module in modules for module in override.modules()):
                override.undo()

    def join(self, other: ModulePrecisions) -> None:
        """Let the overrides of another object be this one's too."""
        self._tags.join(other._tags)
        other._overrides |= self._overrides
        self._overrides, self.any = other._overrides, self.any or other.any

    def _override(self, precisions: Mapping[Module, ModulePrecision | None]) -> Override:
        override = Override(self._tags, precisions, self._undone)
        self._overrides.add(override)
        self.any = bool(self._class_rules or self._tags.values)
        return override

    def _undone(self, override: Override) -> None:
        self._overrides.discard(override)
        self.any = bool(self._class_rules or self._tags.values)

    def _names_a_class(self, rule: ModuleRule, modules: Iterable[Module]) -> bool:
        if rule not in self._class_rules:
            return False
        return any(_is_named(type(module), rule.pattern) for module in modules) or _class_at(rule.pattern) is not None

    def _of_class(self, cls: type) -> ModulePrecision | None:
        try:
            return self._by_class[cls]
        except KeyError:
            pass
        found = None
        for rule in self._class_rules:
            if _is_named(cls, rule.pattern):
                found = _listed(rule)
        self._by_class[cls] = found
        return found


def _listed(rule: ModuleRule) -> ModulePrecision | None:
    # In a list "none" takes an earlier entry away: the module runs as the rest of the list says.
    return None if rule.precision is ModulePrecision.NONE else rule.precision


def _precision(value: str) -> ModulePrecision:
    try:
        return ModulePrecision(value)
    except ValueError:
        raise UsageError(f"precision={value!r} is unknown; choose 'fp32', 'fp16' or 'none'") from None


def _class_at(dotted: str) -> type | None:
    try:
        found = resolve(dotted)
    except PatchError:
        return None
    return found[2] if found is not None and isinstance(found[2], type) else None


def _is_named(cls: type, dotted: str) -> bool:
    """Tell whether a class, or one it derives from, goes by a dotted name: its own, or one it is exported by."""
    exported = _class_at(dotted)
    return any(base is exported or f"{base.__module__}.{base.__qualname__}" == dotted for base in cls.__mro__)
