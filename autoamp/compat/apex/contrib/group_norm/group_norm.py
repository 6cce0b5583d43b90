"""The tree's `apex.contrib.group_norm.group_norm`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.vision import GroupNorm, torch_group_norm

__getattr__ = missing_names(__name__)
