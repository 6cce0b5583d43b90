"""The tree's `apex.contrib.layer_norm.layer_norm`."""

from autoamp.apex.layers.contrib import FastLayerNorm
from autoamp.apex.layers.norm_functions import FastLayerNormFN
