"""The tree's `apex.contrib.focal_loss`."""

from . import focal_loss
