"""NovoGrad: Ginsburg et al. 2019 (arXiv:1905.11286)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.optimizers.groups import FusedOptimizer, require, write_back
from autoamp.scaling import blended_norms, corrections, gradient_norms, novograd_, widened

__all__ = ["FusedNovoGrad"]


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad by multi-tensor functions and in fp32: gradients are normalised by an average of each tensor's norm.

    The norm is that of the gradient as it is, so loss scales must be taken out before, as `autoamp.scale_loss` does.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``, the norm by the root of it.
        betas: Decay of the averages of the normalised gradient and of the norm's square.
        eps: Added to the norm.
        weight_decay: The factor of the decay.
        amsgrad: Not supported.
        reg_inside_moment: Whether gradients are normalised and decayed before they enter the average, or the average
            is.
        grad_averaging: Whether the gradient enters its average with ``1 - beta1``, or with 1.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: Whether the averaged norm starts from 0, or from the norm of the first gradient.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.

    Raises:
        UsageError: ``amsgrad=True``, or an unknown ``norm_type``.
    """

    _options = (*FusedOptimizer._options, "reg_inside_moment")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        require(not amsgrad, "FusedNovoGrad: amsgrad=True is not supported; leave it False")
        require(norm_type in (0, 2), f"FusedNovoGrad: norm_type={norm_type!r} is unknown; choose 2, or 0 for inf")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.reg_inside_moment = bool(reg_inside_moment)

    def _step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for params, grads, firsts in self._parts(group, "exp_avg"):
                values = widened(params)
                novograd_(
                    values, grads, firsts, self._norms(group, params, grads), lr=float(group["lr"]), beta1=beta1,
                    weight=1.0 - beta1 if group["grad_averaging"] else 1.0, eps=group["eps"],
                    biases=corrections(beta1, beta2, group["step"], group["bias_correction"]),
                    decay=group["weight_decay"], inside=self.reg_inside_moment,
                )  # fmt: skip
                write_back(params, values)

    def _norms(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Let the gradients' norms enter their averages, of shape ``()``, and return these."""
        beta2, norm_type = group["betas"][1], group["norm_type"]
        averages = []
        for param, norm in zip(params, gradient_norms(grads, norm_type), strict=True):
            state = self.state[param]
            before = state.get("exp_avg_sq")
            if before is None:
                before = torch.zeros_like(norm) if group["init_zero"] else norm
            state["exp_avg_sq"] = blended_norms(before, norm, beta2, norm_type)
            averages.append(state["exp_avg_sq"])
        return averages

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned, or the state of Apex, which keeps the norms by group.

        Apex lists the norms of fp16 parameters first and of fp32 ones after, and only of those that had a gradient;
        where their number is another, the norms start anew.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            norms = group.pop("exp_avg_sq", None) or ()
            for dtype, values in zip((torch.float16, torch.float32), norms, strict=False):
                params = [param for param in group["params"] if param.dtype is dtype]
                if isinstance(values, Tensor) and len(values) == len(params):
                    for param, value in zip(params, values.unbind(), strict=True):
                        self.state[param]["exp_avg_sq"] = value.detach().to(param.device, torch.float32).clone()
