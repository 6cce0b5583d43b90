"""`FusedAdam` as `apex.contrib.optimizers` has it."""

from __future__ import annotations

from typing import Any

from autoamp.apex.optimizers.fused_adam import FusedAdam


class ContribFusedAdam(FusedAdam):
    """`FusedAdam` with its arguments in the order of early 2019, as `apex.contrib.optimizers` still has them."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay=weight_decay, amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm,
        )  # fmt: skip
