"""The tree's `apex.contrib.groupbn.batch_norm`."""

from __future__ import annotations

from autoamp.compat.layers.vision import BatchNorm2d_NHWC
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
