"""Adam and AdamW: Kingma and Ba 2015 (arXiv:1412.6980), Loshchilov and Hutter 2019 (arXiv:1711.05101)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.optimizers.formulas import adam_updates, average_, corrections
from autoamp.optimizers.groups import FusedOptimizer, require, wide_copies, write_back

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularisation, by multi-tensor functions and in fp32.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the root of the second average.
        adam_w_mode: Whether the decay is decoupled (AdamW), or added to the gradient.
        weight_decay: The factor of the decay.
        amsgrad: Not supported.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.
        capturable: Not needed: taken for the sake of callers.
        master_weights: Whether half parameters are stepped as fp32 copies that the state keeps.

    Raises:
        UsageError: ``amsgrad=True``.
    """

    _options = (*FusedOptimizer._options, "adam_w_mode", "master_weights", "_eps_inside_sqrt")
    # Whether eps is added under the root of the second average, for subclasses.
    _eps_inside_sqrt = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        require(not amsgrad, "FusedAdam: amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = bool(adam_w_mode)
        self.master_weights = master_weights

    def _step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params, grads, firsts, seconds = self._tensors(group, "exp_avg", "exp_avg_sq")
            if not params:
                continue
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            values = self._values(params)
            if decay and not self.adam_w_mode:
                grads = list(torch._foreach_add(grads, values, alpha=decay))
            average_(grads, firsts, seconds, beta1, 1.0 - beta1, beta2)
            biases = corrections(beta1, beta2, group["step"], group["bias_correction"])
            updates = adam_updates(firsts, seconds, biases, group["eps"], eps_inside_sqrt=self._eps_inside_sqrt)
            if decay and self.adam_w_mode:
                torch._foreach_add_(updates, values, alpha=decay)
            torch._foreach_add_(values, updates, alpha=-float(group["lr"]))
            write_back(params, values)

    def _values(self, params: list[Tensor]) -> list[Tensor]:
        """Return what is stepped: copies in fp32, which are kept where masters were asked for."""
        if not self.master_weights:
            return wide_copies(params)
        for param in params:
            if "master_param" not in self.state[param]:
                self.state[param]["master_param"] = param.to(self.state[param]["exp_avg"].dtype, copy=True)
        return [self.state[param]["master_param"] for param in params]
