"""Adagrad: Duchi, Hazan and Singer 2011 (JMLR 12, p. 2121)."""

from __future__ import annotations

from typing import Any

from autoamp.apex.formulas import ADAGRAD
from autoamp.apex.optimizers.groups import FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad by multi-tensor functions, computed as `FusedOptimizer` says.

    Each parameter's state is ``sum``, the sum of squared gradients.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate.
        eps: Added to the root of the sum of squares.
        weight_decay: The factor of the parameter in the decay; 0 for none.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.
        adagrad_w_mode: Whether the decay is decoupled, as in AdamW. If not, it is added to the gradient.
    """

    _rule = ADAGRAD
    _options = (*FusedOptimizer._options, "adagrad_w_mode")

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none=set_grad_none)
        self.adagrad_w_mode = bool(adagrad_w_mode)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]), "eps": group["eps"], "weight_decay": group["weight_decay"],
            "decoupled": self.adagrad_w_mode,
        }  # fmt: skip
