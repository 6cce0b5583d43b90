"""The tree's `apex.contrib.focal_loss.focal_loss`."""

from __future__ import annotations

from autoamp.compat.layers.vision import FocalLoss
from autoamp.compat.layers.vision import focal_loss as focal_loss
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
