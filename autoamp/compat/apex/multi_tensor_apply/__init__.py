"""The tree's `apex.multi_tensor_apply`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.multi_tensor.tensor_lists import MultiTensorApply, multi_tensor_applier

from . import multi_tensor_apply

__getattr__ = missing_names(__name__)
