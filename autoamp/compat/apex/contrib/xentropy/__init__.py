"""The tree's `apex.contrib.xentropy`."""

from autoamp.compat.layers.contrib import SoftmaxCrossEntropyLoss
