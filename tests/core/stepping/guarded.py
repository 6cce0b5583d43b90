"""A guarded optimizer, its scaler, and blocks of them, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.core import DynamicLossScaler, GuardHost, LossScaler, ScaledBlock, StepGuard


class Owner(GuardHost[StepGuard]):
    """Casts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._scalers: list[LossScaler] = []

    @property
    def scalers(self) -> list[LossScaler]:
        return self._scalers


def guard_of(optimizer: Any, *, masters: Any = None, max_consecutive_skips: int = 50) -> StepGuard:
    owner = Owner()
    owner.max_consecutive_skips = max_consecutive_skips
    return StepGuard(optimizer, lambda: owner, masters=masters)


@contextlib.contextmanager
def scale_loss(loss: Tensor, guards: Any, scaler: LossScaler, delay_unscale: bool = False) -> Iterator[Tensor]:
    guards = [guards] if isinstance(guards, StepGuard) else guards
    with ScaledBlock(guards, scaler, delay_unscale=delay_unscale) as scale:
        yield loss.float() * scale


class Setup:
    """One parameter of two elements, an optimizer, its guard and a dynamic scaler of scale 1024."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, dtype: torch.dtype = torch.float32) -> None:
        self.param = Parameter(torch.ones(2, dtype=dtype))
        self.optimizer = optimizer([self.param], lr=0.5)
        self.guard = guard_of(self.optimizer)
        self.scaler = DynamicLossScaler(1024.0)
        self.guard.owner().scalers.append(self.scaler)  # type: ignore[attr-defined]

    def backward(self, factor: float = 1.0, **kwargs: Any) -> None:
        """Run a block whose loss gives every element the gradient ``factor``."""
        with scale_loss((self.param.float() * factor).sum(), self.guard, self.scaler, **kwargs) as scaled:
            scaled.backward()

    @property
    def grad(self) -> list[float]:
        assert self.param.grad is not None
        values: list[float] = self.param.grad.tolist()
        return values
