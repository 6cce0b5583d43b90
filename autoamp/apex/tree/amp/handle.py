"""The tree's `apex.amp.handle`."""

from autoamp.apex.amp.state import AmpHandle, NoOpHandle
from autoamp.apex.initialize import scale_loss
from autoamp.runtime import disable_casts
