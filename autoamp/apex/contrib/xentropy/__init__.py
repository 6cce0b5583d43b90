"""`apex.contrib.xentropy`."""

from autoamp.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss
