"""SGD with momentum, in the form of `torch.optim.SGD` (Sutskever et al. 2013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from autoamp.optimizers.groups import FusedOptimizer, require, write_back
from autoamp.scaling import widened

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD by multi-tensor functions and in fp32.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate; may be left out where every group brings its own.
        momentum: Decay of the velocity.
        dampening: ``1 - dampening`` is the factor of the gradient in the velocity.
        weight_decay: The factor of L2 regularisation.
        nesterov: Whether the step looks ahead; wants a momentum and no dampening.
        wd_after_momentum: Whether the decay is added to the velocity's step, not to the gradient.
        materialize_master_grads: Not needed: masters and halves share one gradient. Taken for the sake of callers.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.

    Attributes:
        most_recent_scale: The next step divides the gradients by it, and sets it back to 1. `scale_loss` leaves true
            gradients and this 1: it is for who scales by hand.
        scale_set_by_backward: Whether ``most_recent_scale`` is what a backward pass left. Set back by a step.

    Raises:
        UsageError: A group has no learning rate; ``nesterov`` without a momentum or with a dampening; a negative
            argument.
    """

    _options = (*FusedOptimizer._options, "wd_after_momentum", "materialize_master_grads")
    # Not in `_options`: a copy has no gradients, so no scale of them. For what unpickles an older one, too.
    most_recent_scale = 1.0
    scale_set_by_backward = False
    materialize_master_grads = True

    def __init__(
        self,
        params: Any,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        numbers: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in numbers.items():
            require(value is required or value >= 0.0, f"FusedSGD: {name}={value} must be 0 or more")
        require(not nesterov or (momentum > 0.0 and dampening == 0.0), "FusedSGD: nesterov wants momentum above 0 and "
                f"dampening 0, not momentum={momentum}, dampening={dampening}")  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer.add_param_group`. UsageError: it has no learning rate."""
        require(
            self.defaults["lr"] is not required or "lr" in param_group,
            "FusedSGD: a group of parameters has no lr, and there is no lr for all groups; "
            "pass FusedSGD(groups, lr=...), or give each group an 'lr'",
        )
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Take one step, as `FusedOptimizer.step` does."""
        loss = super().step(closure)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        return loss

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        if self.most_recent_scale == 1.0 or not grads:
            return grads
        return list(torch._foreach_mul(widened(grads), 1.0 / self.most_recent_scale))

    def _step(self) -> None:
        for group in self.param_groups:
            for params, grads in self._parts(group):
                self._step_part(group, params, grads)

    def _step_part(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        values, decay = widened(params), group["weight_decay"]
        if decay and not self.wd_after_momentum:
            grads = list(torch._foreach_add(grads, values, alpha=decay))
        updates = self._with_momentum(group, params, grads) if group["momentum"] else grads
        if decay and self.wd_after_momentum:
            updates = list(torch._foreach_add(updates, values, alpha=decay))
        torch._foreach_add_(values, updates, alpha=-float(group["lr"]))
        write_back(params, values)

    def _with_momentum(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
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
