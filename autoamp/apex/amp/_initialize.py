"""`apex.amp._initialize`: `initialize` by the name of its inner part, and its walk through nested containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoamp.apex.amp.frontend import initialize as _initialize
from autoamp.torch_private import tree_map


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a value in which ``fn`` took the place of each tensor, and of each object that has a method ``to``.

    Args:
        value: Such an object, or dicts, lists, tuples and named tuples of them at any depth. What else is in it stays.
        fn: Given each of them.
    """
    return tree_map(lambda leaf: fn(leaf) if hasattr(leaf, "to") else leaf, value, is_leaf=lambda v: hasattr(v, "to"))
