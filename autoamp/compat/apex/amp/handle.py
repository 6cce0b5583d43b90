"""The tree's `apex.amp.handle`."""

from autoamp.compat.amp.api import scale_loss
from autoamp.compat.amp.state import AmpHandle, NoOpHandle
from autoamp.runtime import disable_casts
