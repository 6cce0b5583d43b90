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
from autoamp.cli import load_ipython_extension as load_ipython_extension
from autoamp.cli.memory import keep_freed_memory as keep_freed_memory
from autoamp.core import DistributedState as DistributedState
from autoamp.core import DynamicLossScaler as DynamicLossScaler
from autoamp.core import LossScaler as LossScaler
from autoamp.core import Region as Region
from autoamp.core import StaticLossScaler as StaticLossScaler
from autoamp.core import disable_casts as disable_casts
from autoamp.core import float_function as float_function
from autoamp.core import half_function as half_function
from autoamp.core import promote_function as promote_function
from autoamp.core import register_float_function as register_float_function
from autoamp.core import register_half_function as register_half_function
from autoamp.core import register_promote_function as register_promote_function
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
from autoamp.tools import BaseHandle as BaseHandle
from autoamp.tools import Handle as Handle
from autoamp.tools import NoOpHandle as NoOpHandle
from autoamp.tools import compose as _compose
from autoamp.tools import current_handle as current_handle
from autoamp.tools import init as init
from autoamp.tools import region as region
from autoamp.tools.tuning import report_metric as report_metric

_compose()
_watch_fastai1()
