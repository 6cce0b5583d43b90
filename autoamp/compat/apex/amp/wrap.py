"""The tree's `apex.amp.wrap`: its functions wrote into torch's namespace; registered functions do that now."""

from __future__ import annotations

from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
