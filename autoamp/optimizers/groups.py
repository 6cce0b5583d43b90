"""What the optimizers share: the tensors of a group that have gradients, in fp32, with fp32 state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp.errors import UsageError

__all__ = ["FusedOptimizer", "require", "write_back"]


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step`` computes in fp32, for parameters of any floating dtype.

    The number of steps lies in the group, as ``group["step"]``, where checkpoints of Apex have it.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set them to None, or to 0 where ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Take one step. Parameters without a gradient stay as they are.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        raise NotImplementedError

    def _tensors(self, group: dict[str, Any], *names: str) -> tuple[list[Tensor], ...]:
        """Return the group's parameters with gradients, these gradients in fp32, and their states by name."""
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if param.grad.is_sparse:
                raise UsageError(f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam or SGD")
            for name in names:
                if name not in self.state[param]:
                    self.state[param][name] = torch.zeros_like(param, dtype=_wide(param))
        grads = [param.grad.to(_wide(param)) for param in params]
        return params, grads, *([self.state[param][name] for param in params] for name in names)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned. The state stays in fp32, whatever the parameters are in."""
        super().load_state_dict(state_dict)
        # torch casts loaded state to the dtype of the parameter, and what it rounds off is lost.
        given = state_dict["state"]
        places = (key for group in state_dict["param_groups"] for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for key, param in zip(places, params, strict=True):
            for name, value in given.get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    self.state[param][name] = value.detach().to(param.device, _wide(param)).clone()


def _wide(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def write_back(params: list[Tensor], values: list[Tensor]) -> None:
    """Write new values into parameters of whatever dtype."""
    if params:
        torch._foreach_copy_(params, values)


def require(condition: bool, message: str) -> None:
    """Raise UsageError with a message unless a condition holds."""
    if not condition:
        raise UsageError(message)
