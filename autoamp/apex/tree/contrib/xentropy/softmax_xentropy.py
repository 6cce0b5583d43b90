"""The tree's `apex.contrib.xentropy.softmax_xentropy`."""

from autoamp.apex.layers.contrib import SoftmaxCrossEntropyLoss
