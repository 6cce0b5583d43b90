"""The tree's `apex.contrib.xentropy`."""

from __future__ import annotations

from autoamp.compat.layers.contrib import SoftmaxCrossEntropyLoss
from autoamp.compat.missing import missing_names

from . import softmax_xentropy

__getattr__ = missing_names(__name__)
