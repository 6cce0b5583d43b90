"""`apex.amp`: Apex's signatures of `autoamp.initialize`, `autoamp.init` and their family."""

from autoamp.apex.amp._amp_state import _amp_state
from autoamp.apex.amp.amp import init
from autoamp.apex.amp.frontend import initialize, load_state_dict, state_dict
from autoamp.apex.initialize import master_params, scale_loss
from autoamp.core import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
