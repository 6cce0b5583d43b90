"""The tree's `apex.contrib.clip_grad`."""

from __future__ import annotations

from autoamp.compat.layers.contrib import clip_grad_norm_
from autoamp.compat.missing import missing_names

from . import clip_grad

__getattr__ = missing_names(__name__)
