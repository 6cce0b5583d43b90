"""The tree's `apex.multi_tensor_apply.multi_tensor_apply`."""

from autoamp.apex.multi_tensor.tensor_lists import MultiTensorApply
