"""The tree's `apex.amp`."""

from autoamp.apex.amp.api import init, initialize, load_state_dict, state_dict
from autoamp.apex.amp.state import amp_state as _amp_state
from autoamp.apex.initialize import master_params, scale_loss
from autoamp.runtime import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
