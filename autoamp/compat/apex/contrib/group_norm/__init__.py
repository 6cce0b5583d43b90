"""The tree's `apex.contrib.group_norm`."""

from __future__ import annotations

from autoamp.compat.layers.vision import GroupNorm
from autoamp.compat.missing import missing_names

from . import group_norm

__getattr__ = missing_names(__name__)
