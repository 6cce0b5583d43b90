"""The tree's `apex.contrib.conv_bias_relu`."""

from __future__ import annotations

from autoamp.compat.layers.vision import ConvBias, ConvBiasMaskReLU, ConvBiasReLU, ConvFrozenScaleBiasReLU
from autoamp.compat.missing import missing_names

from . import conv_bias_relu

__getattr__ = missing_names(__name__)
