"""The tree's `apex.contrib.group_norm.group_norm`."""

from __future__ import annotations

from autoamp.compat.layers.vision import GroupNorm, torch_group_norm
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
