"""The tree's `apex.amp.utils`."""

from autoamp.compat.amp.utils import is_fp_tensor, maybe_float, maybe_half
