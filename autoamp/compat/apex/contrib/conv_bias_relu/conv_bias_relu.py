"""The tree's `apex.contrib.conv_bias_relu.conv_bias_relu`."""

from autoamp.compat.layers.vision import ConvBias, ConvBiasMaskReLU, ConvBiasReLU, ConvFrozenScaleBiasReLU
