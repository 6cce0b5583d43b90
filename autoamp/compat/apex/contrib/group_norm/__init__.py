"""The tree's `apex.contrib.group_norm`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.vision import GroupNorm

from . import group_norm

__getattr__ = missing_names(__name__)
