"""The tree's `apex.contrib.layer_norm`."""

from __future__ import annotations

from autoamp.compat.layers.contrib import FastLayerNorm
from autoamp.compat.missing import missing_names

from . import layer_norm

__getattr__ = missing_names(__name__)
