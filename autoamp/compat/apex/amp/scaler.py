"""The tree's `apex.amp.scaler`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.scaler import LossScaler

__getattr__ = missing_names(__name__)
