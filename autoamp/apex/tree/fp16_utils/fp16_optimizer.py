"""The tree's `apex.fp16_utils.fp16_optimizer`."""

from autoamp.apex.early.optimizers import FP16_Optimizer
from autoamp.apex.early.scalers import DynamicLossScaler, LossScaler
from autoamp.apex.fp16_utils import clip_grad_norm, master_params_to_model_params, model_grads_to_master_grads
