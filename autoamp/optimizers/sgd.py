"""SGD with momentum, in the form of `torch.optim.SGD` (Sutskever et al. 2013)."""

from __future__ import annotations

from typing import Any

import torch

from autoamp.optimizers.groups import FusedOptimizer, require, wide_copies, write_back

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD by multi-tensor functions and in fp32.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        momentum: Decay of the velocity.
        dampening: ``1 - dampening`` is the factor of the gradient in the velocity.
        weight_decay: The factor of L2 regularisation.
        nesterov: Whether the step looks ahead; wants a momentum and no dampening.
        wd_after_momentum: Whether the decay is added to the velocity's step, not to the gradient.
        materialize_master_grads: Not needed: masters and halves share one gradient. Taken for the sake of callers.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.

    Raises:
        UsageError: ``nesterov`` without a momentum or with a dampening; a negative argument.
    """

    _options = (*FusedOptimizer._options, "wd_after_momentum")

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}.items():
            require(value >= 0.0, f"FusedSGD: {name}={value} must be 0 or more")
        require(not nesterov or (momentum > 0.0 and dampening == 0.0), "FusedSGD: nesterov wants momentum above 0 and "
                f"dampening 0, not momentum={momentum}, dampening={dampening}")  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.wd_after_momentum = wd_after_momentum

    def _step(self) -> None:
        for group in self.param_groups:
            momentum, decay = group["momentum"], group["weight_decay"]
            params, grads = self._tensors(group)
            if not params:
                continue
            values = wide_copies(params)
            if decay and not self.wd_after_momentum:
                grads = list(torch._foreach_add(grads, values, alpha=decay))
            updates = self._with_momentum(group, params, grads) if momentum else grads
            if decay and self.wd_after_momentum:
                updates = list(torch._foreach_add(updates, values, alpha=decay))
            torch._foreach_add_(values, updates, alpha=-float(group["lr"]))
            write_back(params, values)

    def _with_momentum(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        momentum = group["momentum"]
        # The first gradient is the first velocity, without dampening.
        fresh = [(param, grad) for param, grad in zip(params, grads, strict=True)
                 if self.state[param].get("momentum_buffer") is None]  # fmt: skip
        new = {id(param) for param, _ in fresh}
        going = [(param, grad) for param, grad in zip(params, grads, strict=True) if id(param) not in new]
        for param, grad in fresh:
            self.state[param]["momentum_buffer"] = grad.clone()
        if going:
            velocities = [self.state[param]["momentum_buffer"] for param, _ in going]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, [grad for _, grad in going], alpha=1.0 - group["dampening"])
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        return list(torch._foreach_add(grads, buffers, alpha=momentum)) if group["nesterov"] else buffers
