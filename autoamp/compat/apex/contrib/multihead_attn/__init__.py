"""The tree's `apex.contrib.multihead_attn`."""

from __future__ import annotations

from autoamp.compat.layers.attention import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
