"""The tree's `apex.contrib.group_norm`."""

from autoamp.compat.layers.vision import GroupNorm

from . import group_norm
