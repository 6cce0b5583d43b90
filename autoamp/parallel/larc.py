"""LARC, layer-wise adaptive rate control: You et al. 2017 (arXiv:1708.03888), with the clipping that Apex added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import UsageError

__all__ = ["LARC"]


class LARC(torch.optim.Optimizer):
    """Gives each parameter of an optimizer a learning rate of its own, by scaling its gradient before the step.

    With ``r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`` the gradient ``g + weight_decay * w`` is
    multiplied by ``r`` (LARS), or by ``min(r / lr, 1)`` where ``clip``.

    Args:
        optimizer: The optimizer that steps. Its weight decay is part of the scaled gradient.
        trust_coefficient: As in the formula.
        clip: Whether the learning rate is an upper limit.
        eps: As in the formula.

    Raises:
        UsageError: In ``step``: a gradient is sparse. Nothing was changed.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        # No constructor of the base class, as all state is the wrapped optimizer's; but its hooks.
        super().__setstate__({})

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and a scheduler's wrapper of `step` are not copied, as with any optimizer.
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the wrapped optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, in place, and step the wrapped optimizer without weight decay.

        Args:
            closure: Evaluates the loss again, once, before the gradients are scaled; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        if any(grad.layout is not torch.strided for grad in grads):
            raise UsageError("LARC takes no sparse gradients; use torch.nn.Embedding(..., sparse=False)")
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
                self._scale_gradients(group, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _scale_gradients(self, group: dict[str, Any], decay: float) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        grads: list[Tensor] = [param.grad for param in params]
        weight_norms, grad_norms = _norms(params), _norms(grads)
        for param, grad, weight_norm, grad_norm in zip(params, grads, weight_norms, grad_norms, strict=True):
            ratio = self.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + self.eps)
            if self.clip:
                ratio = torch.clamp(ratio / group["lr"], max=1.0)
            # A parameter or gradient that is 0 is stepped as it is; so the choice never waits for the device.
            usable = (weight_norm != 0) & (grad_norm != 0)
            grad.copy_(torch.where(usable, (grad + decay * param) * ratio, grad))


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return 2-norms, computed in fp32 at least: the square of a half number soon leaves its range."""
    double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch._foreach_norm(tensors, 2, dtype=torch.float64 if double else torch.float32)
