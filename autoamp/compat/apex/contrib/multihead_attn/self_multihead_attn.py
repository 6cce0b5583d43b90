"""The tree's `apex.contrib.multihead_attn.self_multihead_attn`."""

from autoamp.compat.layers.attention import SelfMultiheadAttn
