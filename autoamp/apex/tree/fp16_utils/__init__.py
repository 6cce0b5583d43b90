"""The tree's `apex.fp16_utils`."""

from autoamp.apex.early.optimizers import FP16_Optimizer
from autoamp.apex.early.scalers import DynamicLossScaler, LossScaler
from autoamp.apex.fp16_utils import __all__

from .fp16util import *
