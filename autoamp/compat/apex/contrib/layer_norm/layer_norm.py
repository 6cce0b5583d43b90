"""The tree's `apex.contrib.layer_norm.layer_norm`."""

from autoamp.compat.layers.contrib import FastLayerNorm
from autoamp.compat.layers.norm_functions import FastLayerNormFN
