"""The tree's `apex.normalization.fused_layer_norm`."""

from autoamp.apex.layers.norm_functions import *
from autoamp.apex.normalization.fused_layer_norm import *
