"""Listeners for parts of the package that come and go with handles. They are called with the handle, in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

activated: list[Callable[[Any], object]] = []
"""Called when a handle's patches were put in place: by `init`, `initialize` or at the beginning of a region."""

suspended: list[Callable[[Any], object]] = []
"""Called when a handle's patches are about to be taken back, for a while or for good."""
