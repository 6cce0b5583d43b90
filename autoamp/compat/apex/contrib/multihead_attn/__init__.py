"""The tree's `apex.contrib.multihead_attn`."""

from __future__ import annotations

from autoamp.compat.layers.attention import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func
from autoamp.compat.missing import missing_names

from . import encdec_multihead_attn, mask_softmax_dropout_func, self_multihead_attn

__getattr__ = missing_names(__name__)
