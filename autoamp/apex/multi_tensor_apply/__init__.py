"""`apex.multi_tensor_apply`, which calls the functions of `amp_C`."""

from autoamp.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
