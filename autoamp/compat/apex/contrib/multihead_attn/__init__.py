"""The tree's `apex.contrib.multihead_attn`."""

from autoamp.compat.layers.attention import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func

from . import encdec_multihead_attn, mask_softmax_dropout_func, self_multihead_attn
