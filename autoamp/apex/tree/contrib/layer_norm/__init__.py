"""The tree's `apex.contrib.layer_norm`."""

from autoamp.apex.layers.contrib import FastLayerNorm
