"""What the optimizers share: the parameters of a group that have gradients, part by part, with their state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.apex.formulas import Rule, write_back
from autoamp.core import widened
from autoamp.errors import UsageError

# The number of elements that are stepped at a time, so that a temporary copy of them takes 64 MiB in fp32. That is
# enough work to keep a device busy. On a CPU each thread takes as many as fit into its cache.
_AT_ONCE, _FOR_A_THREAD = 2**24, 2**20


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer for parameters of any floating dtype. Its ``step`` computes in fp32, for fp64 parameters in fp64.

    Subclasses have Apex's functions, such as ``multi_tensor_adam``, for programs whose classes call these themselves.

    State tensors have the shape of their parameter, unless a subclass says otherwise, and the dtype of the computation.
    The number of steps is in the group, as ``group["step"]``, where checkpoints of Apex have it.

    Attributes:
        computes_in_fp32: Tells `autoamp.initialize` that ``eps`` is not rounded to the dtype of the parameters.
    """

    computes_in_fp32 = True

    # How it steps, and whether it steps copies of all parameters, which are in the state as ``master_param``.
    _rule: Rule
    _has_masters = False
    # Whether `torch.amp.GradScaler` leaves unscaling and skipping to `step`, for which it sets `grad_scale`, None for
    # unscaled gradients, and `found_inf`: fp32 tensors without dimensions.
    _step_supports_amp_scaling = False
    # The attributes that copies and pickles have, besides groups, state and defaults.
    _options: tuple[str, ...] = ("set_grad_none",)

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """An int32 flag of shape ``[1]`` for subclasses that call ``multi_tensor_applier`` themselves, as Apex's do."""
        param = next((param for group in self.param_groups for param in group["params"]), None)
        return torch.zeros(1, dtype=torch.int32, device=None if param is None else param.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._options}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set them to None, or to 0 where ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Any = None, **given: Any) -> Any:
        """Take one step. Parameters without a gradient stay as they are.

        Args:
            closure: Evaluates the loss again, with gradients; its value is returned.
            **given: Arguments that some versions of Apex take, such as ``grads``; all must be None.

        Raises:
            UsageError: A gradient is sparse, or an argument of another name is not None.
        """
        names = [name for name, value in given.items() if value is not None]
        require(not names, f"{type(self).__name__}.step() got {', '.join(names)}; call step(), which takes gradients "
                "from .grad, or with a torch.amp.GradScaler scaler.step(optimizer)")  # fmt: skip
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            self._step_lists(self._tensors(group, *self._rule.states), **self._numbers(group))

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """Count a step of a group, and return what a rule takes that averages gradients; subclasses add to it."""
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": group["step"],
            "weight_decay": group["weight_decay"], "bias_correction": bool(group["bias_correction"]),
        }  # fmt: skip

    def _step_lists(self, lists: Sequence[list[Tensor]], **numbers: Any) -> None:
        """Step parameters, given their gradients and states: by the kernel or the formula."""
        masters = self._masters if self._has_masters else None
        for part in _in_parts(*self._rule.step_by_kernel(lists, masters, **numbers)):
            self._step_part(*part, **numbers)

    def _step_part(self, params: list[Tensor], grads: list[Tensor], *states: list[Tensor], **numbers: Any) -> None:
        """Step some parameters without the kernel. The fp32 copies of half ones are freed when it returns."""
        values = self._values(params)
        self._rule.formula(values, widened(grads), *states, **numbers)
        write_back(params, values)

    def _values(self, params: list[Tensor]) -> list[Tensor]:
        """Return what is stepped: the parameters, with fp32 copies of half ones; or the copies in the state."""
        return self._masters(params) if self._has_masters else widened(params)

    def _masters(self, params: list[Tensor]) -> list[Tensor]:
        """Return the copies of parameters, in the dtype that they are stepped in, which their state keeps."""
        for param in params:
            if "master_param" not in self.state[param]:
                self.state[param]["master_param"] = param.detach().to(_wide(param), copy=True)
        return [self.state[param]["master_param"] for param in params]

    def _tensors(self, group: dict[str, Any], *names: str) -> tuple[list[Tensor], ...]:
        """Return the group's parameters with gradients, these gradients, and for each name the states under it.

        States that do not exist yet are made, as zeros. UsageError: a gradient is sparse.
        """
        found = [(param, grad) for param in group["params"] if (grad := self._gradient(param)) is not None]
        params = [param for param, _ in found]
        if any(grad.layout is not torch.strided for _, grad in found):
            raise UsageError(f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam or SGD")
        for param in params:
            for name in names:
                if self.state[param].get(name) is None:
                    self.state[param][name] = torch.zeros_like(param, dtype=_wide(param))
        grads = self._prepared(group, [grad for _, grad in found])
        return params, grads, *([self.state[param][name] for param in params] for name in names)

    def _gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, None where it has none."""
        return param.grad

    def _prepared(self, group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients that a group is stepped by, such as unscaled ones, given those of its parameters.

        The step does not write to what is returned, which may be the parameters' own gradients.
        """
        return grads

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned. The state of half parameters stays in fp32.

        Where the number of steps is in the state of the parameters, as in checkpoints of torch and of early Apex, it
        moves to their group. Options that the checkpoint lacks are those of the constructor.
        """
        super().load_state_dict(state_dict)
        # torch casts loaded state to the dtype of the parameter. State of half parameters is rounded by that, so its
        # values are taken from the checkpoint once more.
        given = state_dict["state"]
        places = (key for group in state_dict["param_groups"] for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for key, param in zip(places, params, strict=True):
            for name, value in given.get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    self.state[param][name] = value.detach().to(param.device, _wide(param)).clone()
        for group in self.param_groups:
            states = [self.state[param] for param in group["params"] if param in self.state]
            steps = [int(state.pop("step")) for state in states if "step" in state]
            if steps:
                group.setdefault("step", max(steps))
            if "step" in group:
                # Some optimizers of Apex have the number of steps in a tensor.
                group["step"] = int(group["step"])
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _wide(param: Tensor) -> torch.dtype:
    """Return the dtype that a parameter is stepped in."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def _in_parts(params: list[Tensor], grads: list[Tensor], *states: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield parameters, their gradients and their states, in parts of so many elements as are stepped at a time.

    A larger parameter is a part alone. What is made of a part, such as fp32 copies of half gradients, can be dropped
    with it: that bounds the memory that a step takes.
    """
    begin, taken, on_cpu = 0, 0, min(_AT_ONCE, _FOR_A_THREAD * torch.get_num_threads())
    for end in range(1, len(params) + 1):
        taken += params[end - 1].numel()
        if end == len(params) or taken + params[end].numel() > (on_cpu if params[end].is_cpu else _AT_ONCE):
            yield params[begin:end], grads[begin:end], *(state[begin:end] for state in states)
            begin, taken = end, 0


def require(condition: bool, message: str) -> None:
    """Raise UsageError with ``message`` unless the condition is true."""
    if not condition:
        raise UsageError(message)
