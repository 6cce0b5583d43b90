"""The tree's `apex.fp16_utils`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.fp16_utils import *
from autoamp.fp16_utils import __all__

from . import fp16_optimizer, fp16util, loss_scaler

__getattr__ = missing_names(__name__)
