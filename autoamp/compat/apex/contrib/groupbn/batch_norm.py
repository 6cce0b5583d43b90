"""The tree's `apex.contrib.groupbn.batch_norm`."""

from autoamp.compat.layers.vision import BatchNorm2d_NHWC
