"""LAMB: You et al. 2020 (arXiv:1904.00962), with the clipping by the global norm that BERT training uses."""

from __future__ import annotations

from typing import Any

from autoamp.apex.amp_C.optimizers import multi_tensor_lamb
from autoamp.apex.amp_C.tensor_lists import multi_tensor_l2norm
from autoamp.apex.formulas import LAMB
from autoamp.apex.optimizers.groups import FusedOptimizer, require
from autoamp.core import total_norm


class FusedLAMB(FusedOptimizer):
    """LAMB by multi-tensor functions, computed as `FusedOptimizer` says.

    Each parameter's state is ``exp_avg`` and ``exp_avg_sq``, the averages of its gradient and of the squares.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        betas: The decay of the gradient's average, and of the average of its square.
        eps: Added to the root of the second average.
        weight_decay: The factor of the parameter in the decay; 0 for none.
        amsgrad: Not supported; must be False.
        adam_w_mode: Whether the decay is decoupled, as in AdamW. If not, it is added to the gradient.
        grad_averaging: Whether the weight of the gradient in the first average is ``1 - beta1``. If not, it is 1.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.
        max_grad_norm: The limit of the 2-norm of all groups' gradients together: where that is larger, the gradients
            are divided by the excess. 0 for no clipping.
        use_nvlamb: Whether parameters without weight decay get a trust ratio too.

    Raises:
        UsageError: ``amsgrad=True``.
    """

    _rule = LAMB
    multi_tensor_lamb, multi_tensor_l2norm = staticmethod(multi_tensor_lamb), staticmethod(multi_tensor_l2norm)
    _options = (*FusedOptimizer._options, "adam_w_mode", "use_nvlamb")

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False, adam_w_mode: bool = True,
        grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        require(not amsgrad, "FusedLAMB: amsgrad=True is not supported; leave it False")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = bool(adam_w_mode)
        self.use_nvlamb = use_nvlamb

    def _step(self) -> None:
        taken = [self._tensors(group, *self._rule.states) for group in self.param_groups]
        every = [grad for _, grads, _, _ in taken for grad in grads]
        if not every:
            return
        total = total_norm(every)
        for group, lists in zip(self.param_groups, taken, strict=True):
            self._step_lists(lists, **self._numbers(group), global_norm=total)

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **super()._numbers(group), "decoupled": self.adam_w_mode, "grad_averaging": bool(group["grad_averaging"]),
            "always_adapt": bool(self.use_nvlamb), "max_norm": float(group["max_grad_norm"] or 0.0),
        }  # fmt: skip
