"""LARC, layer-wise adaptive rate control: You et al. 2017 (arXiv:1708.03888), with the clipping that Apex added."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from autoamp.errors import UsageError


def _of_wrapped(name: str) -> Any:
    """Return a property that is an attribute of the wrapped optimizer."""
    get = attrgetter(f"optim.{name}")
    return property(get, lambda larc, value: setattr(larc.optim, name, value), doc=f"The wrapped optimizer's {name}.")


class LARC(torch.optim.Optimizer):
    """Gives each parameter of an optimizer a learning rate of its own, by scaling its gradient before the step.

    With ``r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`` the gradient becomes
    ``(g + weight_decay * w) * r`` (LARS, as in the paper), or with ``clip`` that with ``min(r / lr, 1)`` for
    ``r``, as in Apex. The norms are 2-norms. Where one of them is 0 the gradient stays as it is, without decay.

    Args:
        optimizer: The optimizer that steps. Its groups' ``lr`` and ``weight_decay`` are those of the formula.
        trust_coefficient: As in the formula.
        clip: Whether the optimizer's learning rate is an upper limit.
        eps: As in the formula.

    Attributes:
        optim: The optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        # The base class's constructor would make groups and state, which are the wrapped optimizer's here. This sets up
        # only what hooks need.
        super().__setstate__({})

    param_groups: Any = _of_wrapped("param_groups")
    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    def __getstate__(self) -> dict[str, Any]:
        # Without hooks and a scheduler's wrapper of `step`, which torch's optimizers do not copy either.
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
        """Clear the gradients, as the wrapped optimizer does.

        Args:
            *args: What its ``zero_grad`` takes.
            **kwargs: The same, by name.
        """
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, in place, and step the wrapped optimizer without weight decay.

        Args:
            closure: Evaluates the loss again, once, before the gradients are scaled; its value is returned.

        Raises:
            UsageError: A gradient is sparse. No gradient was scaled and no step taken.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        if any(grad.layout is not torch.strided for grad in grads):
            raise UsageError("LARC takes no sparse gradients; use torch.nn.Embedding(..., sparse=False)")
        decays = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        try:
            for group in self.param_groups:
                self._scale_gradients(group)
            for group, _ in decays:
                group["weight_decay"] = 0.0
            self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _scale_gradients(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        grads: list[Tensor] = [param.grad for param in params]
        decay = group.get("weight_decay", 0.0)
        # Squares in fp16 would overflow.
        dtype = torch.float64 if any(param.dtype is torch.float64 for param in params) else torch.float32
        weight_norms, grad_norms = (torch._foreach_norm(tensors, 2, dtype=dtype) for tensors in (params, grads))
        for param, grad, weight_norm, grad_norm in zip(params, grads, weight_norms, grad_norms, strict=True):
            ratio = self.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + self.eps)
            if self.clip:
                ratio = torch.clamp(ratio / group["lr"], max=1.0)
            # Chosen on the device, which an `if` would wait for.
            usable = (weight_norm != 0) & (grad_norm != 0)
            grad.copy_(torch.where(usable, (grad + decay * param) * ratio, grad))
