"""The tree's `apex.amp.compat`."""

from autoamp.compat.amp.utils import filter_attrs, scalar_python_val, tensor_is_float_tensor, tensor_is_variable
from autoamp.compat.amp.utils import is_tensor as variable_is_tensor
