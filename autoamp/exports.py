"""What `import autoamp` offers. The package itself imports this file when the first of these names is asked for."""

from __future__ import annotations

from autoamp.checkpoints import DistributedState
from autoamp.compat import watch_fastai1 as _watch_fastai1
from autoamp.errors import (
    AutoampError,
    BannedFunctionError,
    CheckpointError,
    ListFileError,
    LossScaleError,
    NonFiniteGradientsError,
    PatchError,
    TapeError,
    TargetError,
    UsageError,
)
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.levels import initialize, load_state_dict, master_params, scale_loss, state_dict
from autoamp.memory import keep_freed_memory
from autoamp.notebook import load_ipython_extension as load_ipython_extension
from autoamp.runtime import (
    BaseHandle,
    Handle,
    NoOpHandle,
    Region,
    current_handle,
    disable_casts,
    float_function,
    half_function,
    init,
    promote_function,
    region,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from autoamp.scaling import DynamicLossScaler, LossScaler, StaticLossScaler
from autoamp.tuning import report_metric

__all__ = [
    "AutoampError",
    "BannedFunctionError",
    "BaseHandle",
    "CheckpointError",
    "DistributedState",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "Handle",
    "ListFileError",
    "LossScaleError",
    "LossScaler",
    "NoOpHandle",
    "NonFiniteGradientsError",
    "PatchError",
    "Region",
    "StaticLossScaler",
    "TapeError",
    "TargetError",
    "UsageError",
    "current_handle",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "keep_freed_memory",
    "load_state_dict",
    "master_params",
    "promote_function",
    "region",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "report_metric",
    "scale_loss",
    "state_dict",
]

_watch_fastai1()
