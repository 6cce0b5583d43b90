"""The tree's `apex.amp.frontend`."""

from autoamp.apex.amp.api import initialize, load_state_dict, state_dict
from autoamp.apex.amp.properties import O0, O1, O2, O3, Properties, opt_levels
from autoamp.apex.amp.state import amp_state as _amp_state
