"""The tree's `apex.contrib.groupbn`."""

from autoamp.compat.layers.vision import BatchNorm2d_NHWC

from . import batch_norm
