"""The tree's `apex.amp`."""

from __future__ import annotations

from autoamp.compat.amp import init, initialize, scale_loss
from autoamp.compat.missing import missing_names
from autoamp.compat.state import amp_state
from autoamp.levels import load_state_dict, master_params, state_dict
from autoamp.runtime import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

from . import _amp_state as _module_of_the_state
from . import amp, compat, frontend, handle, lists, opt, rnn_compat, scaler, utils, wrap

# The object, as Apex had it; the module of the same name is imported by its full path.
_amp_state = amp_state

__getattr__ = missing_names(__name__)
