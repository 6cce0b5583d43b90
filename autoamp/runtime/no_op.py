"""The handle of ``init(enabled=False)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastCache, Casts
from autoamp.diagnostics import Counts, Observer, Watch
from autoamp.modules import ModulePrecisions, Override
from autoamp.rules import CastRule
from autoamp.runtime.protocol import Precision
from autoamp.scaling import StaticLossScaler
from autoamp.stepping import GuardedOptimizers, listed, stepped_params, tell_off

__all__ = ["NoOpHandle"]


class NoOpHandle:
    """What ``init(enabled=False)`` returns: the surface of `Handle`, with nothing behind it."""

    loss_scale = 1.0
    skipped_steps = 0
    last_step_skipped = False
    last_overflow = None
    max_consecutive_skips = 50
    late_bound: tuple[str, ...] = ()
    skipped_rules: tuple[CastRule, ...] = ()

    def __init__(self) -> None:
        self._casts = Casts(torch.float16, "cpu", enable_caching=False, on=False)
        tell_off()

    def __repr__(self) -> str:
        return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"

    @property
    def cache(self) -> CastCache:
        """A cache that stays empty."""
        return self._casts.cache

    def scale_loss(
        self, loss: Any, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager over ``loss`` as it is."""
        return contextlib.nullcontext(loss)

    def leave_to(self, whom: str) -> None:
        """Do nothing: nothing is cast."""

    def masters_from_model(self) -> None:
        """Do nothing: there are no masters."""

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as torch does."""
        params = [param for optimizer in listed(optimizers) for param in stepped_params(optimizer)]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Do nothing: no step is skipped."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give the optimizer a ``scale_loss`` that yields the loss as it is, and return it."""
        optimizer.scale_loss = _unscaled
        return optimizer

    def auto_scale(self) -> AutoScale:
        """Return an `AutoScale` that was not started."""
        scaler = StaticLossScaler(1.0)
        return AutoScale(GuardedOptimizers(self._casts, [scaler]), scaler)

    def observe(self, observer: Observer) -> Watch:
        """Tell nothing: nothing is patched."""
        return Watch(observer.ended)

    def count(self) -> Counts:
        """Return counts that stay at 0."""
        return Counts()

    @contextlib.contextmanager
    def disable_casts(self) -> Iterator[None]:
        """Turn nothing off: nothing is cast."""
        yield

    @contextlib.contextmanager
    def inference(self, model: Module) -> Iterator[Module]:
        """Yield the model as it is."""
        yield model

    def override(self, module: Module, precision: Precision | None = None) -> Override:
        """Do nothing, and return an `Override` that undoes nothing."""
        return ModulePrecisions(()).override_paths(module)

    def is_active(self) -> bool:
        """Return False: no patch is in place."""
        return False

    def deactivate(self) -> tuple[str, ...]:
        """Do nothing."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state: a run without scaling has no use for it."""


@contextlib.contextmanager
def _unscaled(loss: Any, *, delay_unscale: bool = False) -> Iterator[Any]:
    yield loss
