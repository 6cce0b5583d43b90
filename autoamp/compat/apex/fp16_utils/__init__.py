"""The tree's `apex.fp16_utils`."""

from autoamp.compat.early.optimizers import FP16_Optimizer
from autoamp.compat.early.scalers import DynamicLossScaler, LossScaler
from autoamp.fp16_utils import __all__

from .fp16util import *
