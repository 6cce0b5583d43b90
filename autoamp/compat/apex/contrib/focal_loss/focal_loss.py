"""The tree's `apex.contrib.focal_loss.focal_loss`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.vision import FocalLoss
from autoamp.compat.vision import focal_loss as focal_loss

__getattr__ = missing_names(__name__)
