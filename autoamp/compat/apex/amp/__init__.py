"""The tree's `apex.amp`."""

from autoamp.compat.amp.api import init, initialize, load_state_dict, state_dict
from autoamp.compat.amp.state import amp_state
from autoamp.levels import master_params, scale_loss
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
from . import (
    _initialize,
    _process_optimizer,
    amp,
    compat,
    frontend,
    handle,
    lists,
    opt,
    rnn_compat,
    scaler,
    utils,
    wrap,
)

# The object, as Apex had it; the module of the same name is imported by its full path.
_amp_state = amp_state
