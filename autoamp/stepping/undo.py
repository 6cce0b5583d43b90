"""Copies of what an optimizer's step and its closure change, to undo a step that meets inf or nan in its middle."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from autoamp.stepping.attach import stepped_params
from autoamp.tensors import map_tensors


class StepCopy:
    """The parameters, state and options of an optimizer, with their values before a step.

    Args:
        optimizer: It is about to step.
    """

    def __init__(self, optimizer: Any) -> None:
        params = stepped_params(optimizer)
        # Frozen parameters may be inference tensors, which nothing can write to.
        self._params = [(param, param.detach().clone()) for param in params if not param.is_inference()]
        # Other objects in a group, such as a module, stay the ones that they are.
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, map_tensors({**group, "params": None}, lambda value: value.detach().clone()))
            for group in optimizer.param_groups
        ]
        state = getattr(optimizer, "state", None)
        self._state = state if isinstance(state, MutableMapping) else {}
        # State that refers to a parameter goes on referring to it.
        memo: dict[int, Any] = {id(param): param for param in params}
        self._values = {key: copy.deepcopy(value, memo) for key, value in self._state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Give all of them their values of before."""
        for param, value in self._params:
            param.copy_(value)
        for group, options in self._groups:
            params = group["params"]
            group.clear()
            group.update(options, params=params)
        self._state.clear()
        self._state.update(self._values)


class GradsCopy:
    """The gradients that are there before a closure is evaluated, with their values."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._of = [(param, param.grad, param.grad.detach().clone()) for param in params if param.grad is not None]

    @torch.no_grad()
    def restore(self, params: Iterable[Tensor]) -> None:
        """Give all parameters what they had."""
        for param in params:
            param.grad = None
        for param, grad, value in self._of:
            grad.copy_(value)
            param.grad = grad


def state_size(optimizer: Any) -> int:
    """Return the number of parameters for which the optimizer has a state."""
    state = getattr(optimizer, "state", None)
    return len(state) if isinstance(state, Mapping) else 0


def forget_state(optimizer: Any, known: int) -> None:
    """Drop the states that the optimizer has made since it had so many: a skipped step leaves none."""
    state: Any = getattr(optimizer, "state", None)
    for key in list(state)[known:] if isinstance(state, Mapping) else ():
        del state[key]
