"""The tree's `apex.amp.compat`."""

from __future__ import annotations

from autoamp.compat.amp.utils import filter_attrs, scalar_python_val, tensor_is_float_tensor, tensor_is_variable
from autoamp.compat.amp.utils import is_tensor as variable_is_tensor
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
