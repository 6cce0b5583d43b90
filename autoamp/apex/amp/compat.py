"""What programs import from `apex.amp.compat`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def filter_attrs(module: Any, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that are attributes of a module."""
    return [name for name in names if hasattr(module, name)]
