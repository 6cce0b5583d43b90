"""The tree's `apex.amp.utils`."""

from autoamp.apex.amp.utils import is_fp_tensor, maybe_float, maybe_half
