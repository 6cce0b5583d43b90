"""The tree's `apex.contrib.clip_grad`."""

from autoamp.apex.layers.contrib import clip_grad_norm_
