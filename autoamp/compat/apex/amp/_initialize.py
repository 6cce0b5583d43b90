"""The tree's `apex.amp._initialize`."""

from __future__ import annotations

from autoamp.compat.amp.api import initialize as _initialize
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
