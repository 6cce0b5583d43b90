"""The tree's `apex.contrib.focal_loss.focal_loss`."""

from autoamp.compat.layers.vision import FocalLoss
from autoamp.compat.layers.vision import focal_loss as focal_loss
