"""The tree's `apex.fp16_utils.loss_scaler`."""

from autoamp.compat.early.scalers import DynamicLossScaler, LossScaler
from autoamp.fp16_utils import to_python_float
