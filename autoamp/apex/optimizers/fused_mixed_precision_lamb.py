"""LAMB for models in half precision: fp32 masters of its own, and gradients that a `torch.amp.GradScaler` scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from autoamp.apex.formulas import LAMB
from autoamp.apex.optimizers.fused_lamb import FusedLAMB
from autoamp.core import widened


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that can step fp32 copies of half parameters, and takes a `torch.amp.GradScaler`.

    ``scaler.step(optimizer)`` unscales the gradients, half ones too, and skips the step where they hold inf or nan. The
    host waits for the device to learn that. The parameters' own gradients stay scaled.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate.
        step: The number of steps that were taken already.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        betas: The decay of the gradient's average, and of the average of its square.
        eps: Added to the root of the second average.
        weight_decay: The factor of the parameter in the decay; 0 for none.
        amsgrad: Not supported; must be False.
        adam_w_mode: Whether the decay is decoupled, as in AdamW. If not, it is added to the gradient.
        grad_averaging: Whether the weight of the gradient in the first average is ``1 - beta1``. If not, it is 1.
        max_grad_norm: The limit of the 2-norm of all groups' gradients together: where that is larger, the gradients
            are divided by the excess. 0 for no clipping.
        use_nvlamb: Whether parameters without weight decay get a trust ratio too.
        reduced_precision_dtype: For parameters of this dtype fp32 copies are stepped, which are in the state as
            ``master_param``, and the parameters are set to them after each step. None for no copies.

    Raises:
        UsageError: ``amsgrad=True``.
    """

    # It may step copies, of which a kernel knows nothing.
    _rule = dataclasses.replace(LAMB, kernel=None)
    _step_supports_amp_scaling = True
    _options = (*FusedLAMB._options, "reduced_precision_dtype")

    def __init__(
        self, params: Any, lr: float = 1e-3, step: int = 0, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True, max_grad_norm: float = 1.0,
        use_nvlamb: bool = False, reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging,
            max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        )  # fmt: skip
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = step

    def _step(self) -> None:
        # To read the flag is to wait for the device.
        if not bool(getattr(self, "found_inf", False)):
            super()._step()

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            return grads
        inverse = scale.double().reciprocal().float()
        return [grad * inverse.to(grad) for grad in widened(grads)]

    def _values(self, params: list[Tensor]) -> list[Tensor]:
        reduced = self.reduced_precision_dtype
        return widened(self._masters([param])[0] if param.dtype is reduced else param for param in params)
