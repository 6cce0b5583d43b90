"""The tree's `apex.contrib.clip_grad`."""

from autoamp.compat.layers.contrib import clip_grad_norm_
