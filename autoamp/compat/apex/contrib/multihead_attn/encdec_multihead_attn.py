"""The tree's `apex.contrib.multihead_attn.encdec_multihead_attn`."""

from autoamp.compat.layers.attention import EncdecMultiheadAttn
