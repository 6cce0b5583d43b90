"""The tree's `apex.contrib.multihead_attn.mask_softmax_dropout_func`."""

from autoamp.compat.layers.attention import fast_mask_softmax_dropout_func
