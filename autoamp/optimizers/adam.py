"""Adam and AdamW: Kingma and Ba 2015 (arXiv:1412.6980), Loshchilov and Hutter 2019 (arXiv:1711.05101)."""

from __future__ import annotations

from typing import Any

import torch

from autoamp.optimizers.groups import FusedOptimizer, require, write_back

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
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            values = self._values(params)
            if decay and self.adam_w_mode:
                torch._foreach_mul_(values, 1.0 - lr * decay)
            elif decay:
                grads = list(torch._foreach_add(grads, values, alpha=decay))
            torch._foreach_lerp_(firsts, grads, 1.0 - beta1)
            torch._foreach_mul_(seconds, beta2)
            torch._foreach_addcmul_(seconds, grads, grads, 1.0 - beta2)
            first_bias, second_bias = 1.0, 1.0
            if group["bias_correction"]:
                first_bias, second_bias = 1.0 - beta1 ** group["step"], 1.0 - beta2 ** group["step"]
            roots = torch._foreach_sqrt(seconds)
            torch._foreach_div_(roots, second_bias**0.5)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(values, firsts, roots, -lr / first_bias)
            write_back(params, values)

    def _values(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is stepped: copies in fp32, which are kept where masters were asked for."""
        if not self.master_weights:
            return [param.to(self.state[param]["exp_avg"].dtype, copy=True) for param in params]
        for param in params:
            if "master_param" not in self.state[param]:
                self.state[param]["master_param"] = param.to(self.state[param]["exp_avg"].dtype, copy=True)
        return [self.state[param]["master_param"] for param in params]
