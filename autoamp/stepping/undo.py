"""A copy of what an optimizer's step changes, to undo a step that meets inf or nan in its middle."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch

from autoamp.stepping.attach import stepped_params
from autoamp.tensors import map_tensors

__all__ = ["StepCopy"]


class StepCopy:
    """The parameters, state and options of an optimizer, with their values before a step.

    Args:
        optimizer: It is about to step.
    """

    def __init__(self, optimizer: Any) -> None:
        params = stepped_params(optimizer)
        # Frozen parameters may be inference tensors, which nothing can write to.
        self._params = [(param, param.detach().clone()) for param in params if not param.is_inference()]
        self._groups = [(group, _options(group)) for group in optimizer.param_groups]
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


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    copied: dict[str, Any] = map_tensors(options, lambda value: value.detach().clone())
    return copied
