"""The tree's `apex.amp.frontend`."""

from autoamp.compat.amp.api import initialize, load_state_dict, state_dict
from autoamp.compat.amp.properties import O0, O1, O2, O3, Properties, opt_levels
from autoamp.compat.amp.state import amp_state as _amp_state
