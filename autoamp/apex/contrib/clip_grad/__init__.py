"""`apex.contrib.clip_grad`."""

from autoamp.apex.contrib.clip_grad.clip_grad import clip_grad_norm_
