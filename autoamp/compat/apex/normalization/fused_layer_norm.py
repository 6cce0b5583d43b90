"""The tree's `apex.normalization.fused_layer_norm`."""

from autoamp.compat.layers.norm_functions import *
from autoamp.normalization import *
