from autoamp.apex.normalization.fused_layer_norm import *
