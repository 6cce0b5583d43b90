"""SGD with momentum (Sutskever et al. 2013), by the formulas of `torch.optim.SGD`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from autoamp.apex.amp_C.optimizers import multi_tensor_sgd
from autoamp.apex.formulas import SGD
from autoamp.apex.optimizers.groups import FusedOptimizer, require
from autoamp.core import widened


class FusedSGD(FusedOptimizer):
    """SGD by multi-tensor functions, computed as `FusedOptimizer` says.

    With a momentum each parameter's state is ``momentum_buffer``, its velocity.

    Args:
        params: Floating parameters of any shapes, or groups of them as `torch.optim.Optimizer` takes.
        lr: The learning rate, 0 or more. It may be left out where every group has its own.
        momentum: The decay of the velocity, 0 or more; 0 for no velocity.
        dampening: ``1 - dampening`` is the factor of the gradient in the velocity.
        weight_decay: The factor of the parameter in the decay, 0 or more.
        nesterov: Whether the momentum is Nesterov's. Needs a momentum, and a dampening of 0.
        wd_after_momentum: Whether the decay is added to the velocity. If not, it is added to the gradient.
        materialize_master_grads: Has no effect: a master and its half parameter have one gradient in common. It exists
            because Apex has it.
        set_grad_none: Whether ``zero_grad`` sets gradients to None.

    Attributes:
        most_recent_scale: By what the next step divides the gradients, which sets it back to 1. For programs that scale
            by hand: `autoamp.scale_loss` unscales the gradients itself and leaves this at 1.
        scale_set_by_backward: For programs that scale by hand, and not read here; a step sets it to False.

    Raises:
        ValueError: A group has no learning rate.
        UsageError: ``nesterov`` without a momentum or with a dampening; a negative ``lr``, ``momentum`` or
            ``weight_decay``.
    """

    _rule = SGD
    multi_tensor_sgd = staticmethod(multi_tensor_sgd)
    _options = (*FusedOptimizer._options, "wd_after_momentum", "materialize_master_grads")
    # Class attributes are defaults for optimizers that were pickled before the attributes existed. The first two are
    # not in `_options`: a copy has no gradients, so there is nothing to divide.
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

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        if self.most_recent_scale == 1.0 or not grads:
            return grads
        return list(torch._foreach_mul(widened(grads), 1.0 / self.most_recent_scale))

    def _step(self) -> None:
        for group in self.param_groups:
            numbers = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")}
            numbers.update(lr=float(group["lr"]), decay_after_momentum=self.wd_after_momentum)
            if not group["momentum"]:
                self._step_lists(self._tensors(group), **numbers)
                continue
            new = {id(param) for param in group["params"] if self.state.get(param, {}).get("momentum_buffer") is None}
            lists = self._tensors(group, *self._rule.states)
            # The first gradient is the first velocity, without dampening.
            for first in (True, False):
                rows = [row for row in zip(*lists, strict=True) if (id(row[0]) in new) is first]
                if rows:
                    self._step_lists([list(column) for column in zip(*rows, strict=True)], **numbers, first=first)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
