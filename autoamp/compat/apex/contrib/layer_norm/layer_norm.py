"""The tree's `apex.contrib.layer_norm.layer_norm`."""

from __future__ import annotations

from autoamp.compat.contrib import FastLayerNorm
from autoamp.compat.missing import missing_names
from autoamp.compat.norm_functions import FastLayerNormFN

__getattr__ = missing_names(__name__)
