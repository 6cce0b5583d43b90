"""The tree's `apex.contrib.groupbn.batch_norm`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.vision import BatchNorm2d_NHWC

__getattr__ = missing_names(__name__)
