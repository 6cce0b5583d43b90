"""The tree's `apex.amp.handle`."""

from __future__ import annotations

from autoamp.compat.amp.api import scale_loss
from autoamp.compat.amp.state import AmpHandle, NoOpHandle
from autoamp.compat.missing import missing_names
from autoamp.runtime import disable_casts

__getattr__ = missing_names(__name__)
