"""The tree's `apex.contrib.xentropy.softmax_xentropy`."""

from autoamp.compat.layers.contrib import SoftmaxCrossEntropyLoss
