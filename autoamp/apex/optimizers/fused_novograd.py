"""NovoGrad: Ginsburg et al. 2019 (arXiv:1905.11286)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.apex.formulas import NOVOGRAD
from autoamp.apex.optimizers.groups import FusedOptimizer, require


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad by multi-tensor functions, computed as `FusedOptimizer` says.

    Each gradient is divided by an average of its norms. A loss scale in the gradients would change these norms, so it
    must be taken out before the step, as `autoamp.scale_loss` does.

    Each parameter's state is ``exp_avg``, the average of its normalised gradient, and ``exp_avg_sq``, the average of
    the norm itself, a tensor without dimensions.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate.
        bias_correction: Whether the gradient's average is divided by ``1 - beta1 ** step``, and the norm's by the root
            of ``1 - beta2 ** step``.
        betas: The decay of the gradient's average, and of the norm's.
        eps: Added to the averaged norm.
        weight_decay: The factor of the parameter in the decay; 0 for none.
        amsgrad: Not supported; must be False.
        reg_inside_moment: Whether gradients are normalised, and the decay added to them, before they enter the average.
            If not, the average is normalised, and the decay added to that.
        grad_averaging: Whether the weight of the gradient in its average is ``1 - beta1``. If not, it is 1.
        norm_type: 2 for the 2-norm, whose squares are averaged; 0 for the largest absolute value.
        init_zero: Whether the averaged norm starts from 0. If not, it starts from the norm of the first gradient.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.

    Raises:
        UsageError: ``amsgrad=True``, or an unknown ``norm_type``.
    """

    _rule = NOVOGRAD
    _options = (*FusedOptimizer._options, "reg_inside_moment")

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, reg_inside_moment: bool = False,
        grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        require(not amsgrad, "FusedNovoGrad: amsgrad=True is not supported; leave it False")
        require(norm_type in (0, 2), f"FusedNovoGrad: norm_type={norm_type!r} is unknown; choose 2, or 0 for inf")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.reg_inside_moment = bool(reg_inside_moment)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        grad_averaging = bool(group["grad_averaging"])
        return {**super()._numbers(group), "inside": self.reg_inside_moment, "grad_averaging": grad_averaging}

    def _tensors(self, group: dict[str, Any], *names: str) -> tuple[list[Tensor], ...]:
        """Return these and the averages of the gradients' norms, of shape ``()``, which the new norms have entered."""
        params, grads, *states = super()._tensors(group, *names)
        is_root, beta2 = group["norm_type"] == 2, group["betas"][1]
        for param, grad in zip(params, grads, strict=True):
            # Of an empty gradient there is no largest absolute value.
            kind = 2.0 if is_root or grad.numel() == 0 else float("inf")
            norm = torch.linalg.vector_norm(grad, kind, dtype=torch.promote_types(grad.dtype, torch.float32))
            state = self.state[param]
            before = state.get("exp_avg_sq", torch.zeros_like(norm) if group["init_zero"] else norm)
            # For 2-norms the root of the averaged squares (algorithm 1), else the average of the norms.
            if is_root:
                state["exp_avg_sq"] = (beta2 * before**2 + (1.0 - beta2) * norm**2).sqrt()
            else:
                state["exp_avg_sq"] = before.lerp(norm, 1.0 - beta2)
        return params, grads, *states, [self.state[param]["exp_avg_sq"] for param in params]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned, or that of Apex, which has the norms in the group.

        Apex has them in two tensors, for the fp16 parameters and for the fp32 ones, and only for those that had a
        gradient. Where their number is not that of the parameters of this dtype, the norms start anew.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            norms = group.pop("exp_avg_sq", None) or ()
            for dtype, values in zip((torch.float16, torch.float32), norms, strict=False):
                params = [param for param in group["params"] if param.dtype is dtype]
                if isinstance(values, Tensor) and len(values) == len(params):
                    for param, value in zip(params, values.unbind(), strict=True):
                        self.state[param]["exp_avg_sq"] = value.detach().to(param.device, torch.float32).clone()
