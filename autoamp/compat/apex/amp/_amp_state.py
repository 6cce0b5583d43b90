"""The tree's `apex.amp._amp_state`."""

from __future__ import annotations

from autoamp.compat.amp.api import maybe_print, warn_or_err
from autoamp.compat.amp.state import AmpState
from autoamp.compat.amp.state import amp_state as _amp_state
from autoamp.compat.missing import missing_names
from autoamp.levels import master_params

__getattr__ = missing_names(__name__)
