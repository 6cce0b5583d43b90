"""The tree's `apex.fp16_utils.loss_scaler`."""

from autoamp.apex.early.scalers import DynamicLossScaler, LossScaler
from autoamp.apex.fp16_utils import to_python_float
