"""What single modules are given: a random string in the module's ``__dict__``, and here what the string means.

A module that is given something refers to nothing of ours, and nothing here refers to it. A copy carries the string
along, and with it what the module was given; to another handle or process the string means nothing. The string means
something as long as the module lives, or a copy of it that is no pickle's.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Container
from typing import Any, Generic, TypeVar

from torch.nn import Module

from autoamp.torch_private import trace_as

TAGS = "_autoamp_tags"
"""The entry of a module's ``__dict__`` that has its tags, a tuple of strings. One without tags has no such entry."""

T = TypeVar("T")


class _Tag(str):
    """A tag that a module shares with its copies, so that it lives as long as one of them. In a pickle it is a str."""

    def __deepcopy__(self, memo: Any) -> _Tag:
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)


def _get_traced(tags: ModuleTags[Any], module: Module, default: Any = None) -> Any:
    """`ModuleTags.get` for Dynamo, which guards on an attribute that is missing, and on no missing key of a dict."""
    for tag in reversed(getattr(module, TAGS, ())):
        if tag in tags.values:
            return tags.values[str(tag)]
    return default


class ModuleTags(Generic[T]):
    """Tags of one meaning.

    Attributes:
        values: What each tag stands for.
        any: Whether there may be values. Compiled code guards on it, as it does not on a dict.
    """

    def __init__(self) -> None:
        self.values: dict[str, T] = {}
        self.any = False
        # The modules that the tags were given to.
        self._holders: dict[str, weakref.ref[Module]] = {}

    def give(self, module: Module, value: T) -> str:
        """Give a module a value, above those that it was given before, and return the tag, for `take`."""
        tag = _Tag(uuid.uuid4().hex)
        key = str(tag)
        self.values[key], self._holders[key], self.any = value, weakref.ref(module), True
        weakref.finalize(tag, self.take, key).atexit = False
        vars(module)[TAGS] = (*vars(module).get(TAGS, ()), tag)
        return key

    def replace(self, module: Module, value: T) -> None:
        """Give a module a value in place of all that it has; what it has as a copy stays that of its original."""
        vars(module)[TAGS] = tuple(tag for tag in vars(module).get(TAGS, ()) if tag not in self.values)
        self.give(module, value)

    @trace_as(_get_traced)
    def get(self, module: Module, default: Any = None) -> T | Any:
        """Return the last value that a module was given, or the one it is a copy of; ``default`` without any."""
        tags: tuple[str, ...] = module.__dict__.get(TAGS, ())
        for tag in reversed(tags):
            if tag in self.values:
                return self.values[tag]
        return default

    def holder(self, tag: str) -> Module | None:
        """Return the module that a tag was given to; None where it is gone, or the tag means nothing any more."""
        found = self._holders.get(tag)
        return None if found is None else found()

    def take(self, tag: str) -> None:
        """Let a tag mean nothing any more, and the module that it was given to, if it is still there, not carry it."""
        module = self.holder(tag)
        if module is not None:
            rest = tuple(other for other in vars(module).get(TAGS, ()) if other != tag)
            if rest:
                vars(module)[TAGS] = rest
            else:
                vars(module).pop(TAGS, None)
        self.values.pop(tag, None)
        self._holders.pop(tag, None)
        self.any = bool(self.values)

    def take_all(self, modules: Container[Module] | None = None) -> None:
        """Take the tags that these modules were given, by default those of all."""
        for tag, holder in list(self._holders.items()):
            if modules is None or holder() in modules:
                self.take(tag)
