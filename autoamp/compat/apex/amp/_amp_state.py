"""The tree's `apex.amp._amp_state`."""

from autoamp.compat.amp.state import AmpState
from autoamp.compat.amp.state import amp_state as _amp_state
from autoamp.levels import master_params
