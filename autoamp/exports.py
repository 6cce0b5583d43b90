"""What `import autoamp` offers. The package itself imports this file when the first of these names is asked for.

``as`` tells type checkers that a name is one of the package's own.
"""

from __future__ import annotations

from autoamp.apex.fastai1 import watch as _watch_fastai1
from autoamp.apex.fp16_utils import FP16_Optimizer as FP16_Optimizer
from autoamp.apex.initialize import initialize as initialize
from autoamp.apex.initialize import load_state_dict as load_state_dict
from autoamp.apex.initialize import master_params as master_params
from autoamp.apex.initialize import scale_loss as scale_loss
from autoamp.apex.initialize import state_dict as state_dict
from autoamp.checkpoints import DistributedState as DistributedState
from autoamp.cli import load_ipython_extension as load_ipython_extension
from autoamp.diagnostics import BaseHandle as BaseHandle
from autoamp.diagnostics import Handle as Handle
from autoamp.diagnostics import NoOpHandle as NoOpHandle
from autoamp.diagnostics import compose as _compose
from autoamp.diagnostics import current_handle as current_handle
from autoamp.diagnostics import init as init
from autoamp.diagnostics import region as region
from autoamp.errors import AutoampError as AutoampError
from autoamp.errors import BannedFunctionError as BannedFunctionError
from autoamp.errors import CheckpointError as CheckpointError
from autoamp.errors import ListFileError as ListFileError
from autoamp.errors import LossScaleError as LossScaleError
from autoamp.errors import NonFiniteGradientsError as NonFiniteGradientsError
from autoamp.errors import PatchError as PatchError
from autoamp.errors import TapeError as TapeError
from autoamp.errors import TargetError as TargetError
from autoamp.errors import UsageError as UsageError
from autoamp.memory import keep_freed_memory as keep_freed_memory
from autoamp.runtime import Region as Region
from autoamp.runtime import disable_casts as disable_casts
from autoamp.runtime import float_function as float_function
from autoamp.runtime import half_function as half_function
from autoamp.runtime import promote_function as promote_function
from autoamp.runtime import register_float_function as register_float_function
from autoamp.runtime import register_half_function as register_half_function
from autoamp.runtime import register_promote_function as register_promote_function
from autoamp.scaling import DynamicLossScaler as DynamicLossScaler
from autoamp.scaling import LossScaler as LossScaler
from autoamp.scaling import StaticLossScaler as StaticLossScaler
from autoamp.tuning import report_metric as report_metric

_compose()
_watch_fastai1()
