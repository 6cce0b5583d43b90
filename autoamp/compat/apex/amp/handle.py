"""The tree's `apex.amp.handle`."""

from autoamp.compat.amp.state import AmpHandle, NoOpHandle
from autoamp.levels import scale_loss
from autoamp.runtime import disable_casts
