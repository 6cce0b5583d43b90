"""The tree's `apex.contrib.layer_norm`."""

from autoamp.compat.layers.contrib import FastLayerNorm
