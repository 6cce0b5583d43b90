"""The tree's `apex.contrib.xentropy`."""

from autoamp.apex.layers.contrib import SoftmaxCrossEntropyLoss
