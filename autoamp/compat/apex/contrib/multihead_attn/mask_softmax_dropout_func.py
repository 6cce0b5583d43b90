"""The tree's `apex.contrib.multihead_attn.mask_softmax_dropout_func`."""

from __future__ import annotations

from autoamp.compat.layers.attention import fast_mask_softmax_dropout_func
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
