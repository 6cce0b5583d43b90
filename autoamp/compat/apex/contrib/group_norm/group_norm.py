"""The tree's `apex.contrib.group_norm.group_norm`."""

from autoamp.compat.layers.vision import GroupNorm, torch_group_norm
