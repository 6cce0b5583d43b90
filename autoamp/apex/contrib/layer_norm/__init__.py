"""`apex.contrib.layer_norm`."""

from autoamp.apex.contrib.layer_norm.layer_norm import FastLayerNorm
