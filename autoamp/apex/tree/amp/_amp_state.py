"""The tree's `apex.amp._amp_state`."""

from autoamp.apex.amp.state import AmpState
from autoamp.apex.amp.state import amp_state as _amp_state
from autoamp.apex.initialize import master_params
