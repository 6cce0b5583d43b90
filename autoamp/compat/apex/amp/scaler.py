"""The tree's `apex.amp.scaler`."""

from __future__ import annotations

from autoamp.compat.amp.scaler import LossScaler
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
