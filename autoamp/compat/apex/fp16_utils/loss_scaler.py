"""The tree's `apex.fp16_utils.loss_scaler`."""

from __future__ import annotations

from autoamp.compat.early.scalers import DynamicLossScaler, LossScaler
from autoamp.compat.missing import missing_names
from autoamp.fp16_utils import to_python_float

__getattr__ = missing_names(__name__)
