"""The tree's `apex.contrib.layer_norm.layer_norm`."""

from __future__ import annotations

from autoamp.compat.layers.contrib import FastLayerNorm
from autoamp.compat.layers.norm_functions import FastLayerNormFN
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
