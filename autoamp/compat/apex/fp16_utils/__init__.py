"""The tree's `apex.fp16_utils`."""

from autoamp.compat.early.optimizers import FP16_Optimizer
from autoamp.compat.early.scalers import DynamicLossScaler, LossScaler
from autoamp.fp16_utils import (
    BN_convert_float,
    FP16Model,
    __all__,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

from . import fp16_optimizer, fp16util, loss_scaler
