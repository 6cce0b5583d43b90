"""The tree's `apex.contrib.multihead_attn.encdec_multihead_attn`."""

from __future__ import annotations

from autoamp.compat.layers.attention import EncdecMultiheadAttn
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
