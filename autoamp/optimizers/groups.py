"""What the optimizers share: the tensors of a group that have gradients, in fp32 and in parts, with fp32 state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autoamp.errors import UsageError
from autoamp.scaling import widened

__all__ = ["FusedOptimizer", "in_parts", "require", "scaling_of", "wide_copy", "write_back"]

# For so many elements at a time there is what a step makes on its way: 64 MiB in fp32, enough to keep a device busy.
_AT_ONCE = 2**24


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step`` computes in fp32, for parameters of any floating dtype.

    The number of steps lies in the group, as ``group["step"]``, where checkpoints of Apex have it.
    """

    # The attributes that a copy and a pickle keep, besides groups and state.
    _options: tuple[str, ...] = ("set_grad_none",)

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._options}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set them to None, or to 0 where ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Take one step. Parameters without a gradient stay as they are.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.

        Raises:
            UsageError: A gradient is sparse.
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
        """Return the group's parameters with gradients, these gradients, and their states by name."""
        found = [(param, grad) for param in group["params"] if (grad := self._gradient(param)) is not None]
        params = [param for param, _ in found]
        for param, grad in found:
            if grad.layout is not torch.strided:
                raise UsageError(f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam or SGD")
            for name in names:
                if name not in self.state[param]:
                    self.state[param][name] = torch.zeros_like(param, dtype=_wide(param))
        grads = self._prepared(group, [grad for _, grad in found])
        return params, grads, *([self.state[param][name] for param in params] for name in names)

    def _parts(self, group: dict[str, Any], *names: str) -> Iterator[tuple[list[Tensor], ...]]:
        """Yield what `_tensors` returns by `in_parts`."""
        return in_parts(*self._tensors(group, *names))

    def _gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, which the step does not write to."""
        return param.grad

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        """Return what a group is stepped by, given its gradients. It is not to write to these."""
        return grads

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned. The state stays in fp32, whatever the parameters are in.

        Where the number of steps lies with the parameters, as in checkpoints of torch and of early Apex, it goes to
        their group. Options that the checkpoint lacks are those of the constructor.
        """
        super().load_state_dict(state_dict)
        # torch casts loaded state to the dtype of the parameter, and what it rounds off is lost.
        given = state_dict["state"]
        places = (key for group in state_dict["param_groups"] for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for key, param in zip(places, params, strict=True):
            for name, value in given.get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    self.state[param][name] = value.detach().to(param.device, _wide(param)).clone()
        for group in self.param_groups:
            steps = [int(self.state[param].pop("step")) for param in group["params"] if "step" in self.state[param]]
            if steps:
                group.setdefault("step", max(steps))
            if "step" in group:
                # Some optimizers of Apex count in a tensor.
                group["step"] = int(group["step"])
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _wide(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def wide_copy(param: Tensor) -> Tensor:
    """Return a copy of a parameter in fp32, or in fp64 where it is in that."""
    return param.detach().to(_wide(param), copy=True)


def in_parts(params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield parameters, their gradients in fp32 and their states, so many at a time that they have `_AT_ONCE` elements.

    A larger parameter comes alone. The half ones' gradients are there in fp32 for as long as their part is stepped.
    """
    begin, taken = 0, 0
    for end in range(1, len(params) + 1):
        taken += params[end - 1].numel()
        if end == len(params) or taken + params[end].numel() > _AT_ONCE:
            yield params[begin:end], widened(grads[begin:end]), *(state[begin:end] for state in states)
            begin, taken = end, 0


def write_back(params: list[Tensor], values: list[Tensor]) -> None:
    """Write new values into parameters of whatever dtype, where they are not the parameters themselves."""
    pairs = [(param, value) for param, value in zip(params, values, strict=True) if param is not value]
    if pairs:
        torch._foreach_copy_([param for param, _ in pairs], [value for _, value in pairs])


def scaling_of(scaler: Any, optimizer: Any) -> tuple[Tensor | None, Tensor]:
    """Return what a `torch.amp.GradScaler` multiplied an optimizer's gradients by, and how many are not finite.

    Both have no dimensions and lie on the scaler's device; nobody waits for it. The first is None where the gradients
    were unscaled already.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    unscaled = state["stage"] is OptState.UNSCALED
    found = state["found_inf_per_device"] if unscaled else scaler._check_inf_per_device(optimizer)
    scale: Tensor = scaler._get_scale_async()
    total = torch.zeros((), device=scale.device)
    for inf in found.values():
        total = total + inf.to(scale.device, non_blocking=True).reshape(())
    return None if unscaled else scale, total


def require(condition: bool, message: str) -> None:
    """Raise UsageError with a message unless a condition holds."""
    if not condition:
        raise UsageError(message)
