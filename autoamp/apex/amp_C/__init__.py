"""`amp_C`, as autoamp serves it: Apex's extension of functions of lists of tensors."""

from autoamp.apex.amp_C.optimizers import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_lamb,
    multi_tensor_lamb_stage1,
    multi_tensor_lamb_stage2,
    multi_tensor_sgd,
)
from autoamp.apex.amp_C.tensor_lists import multi_tensor_axpby, multi_tensor_l2norm, multi_tensor_scale

# With a list of masters the one function does what Apex has a second one for.
multi_tensor_adam_capturable_master = multi_tensor_adam_capturable
# Versions of Apex differ in these two names.
multi_tensor_lamb_stage1_cuda = multi_tensor_lamb_stage1
multi_tensor_lamb_stage2_cuda = multi_tensor_lamb_stage2
