"""The tree's `apex.contrib.xentropy`."""

from autoamp.compat.layers.contrib import SoftmaxCrossEntropyLoss

from . import softmax_xentropy
