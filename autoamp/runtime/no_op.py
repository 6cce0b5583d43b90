"""The handle of ``init(enabled=False)``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastCache, Casts
from autoamp.diagnostics import (
    CastTrace,
    Counts,
    Explanation,
    Followers,
    Observation,
    Observer,
    Overflow,
    RangeProfile,
    Watch,
    explain,
)
from autoamp.kernels import Backend
from autoamp.modules import ModulePrecisions, Override
from autoamp.rules import CastRule, CastTable
from autoamp.runtime.protocol import OneToAProcess, Precision
from autoamp.scaling import StaticLossScaler
from autoamp.stepping import GuardedOptimizers, listed, stepped_params

__all__ = ["NoOpHandle"]


class NoOpHandle(OneToAProcess):
    """What ``init(enabled=False)`` returns: the surface of `Handle`, with nothing behind it."""

    loss_scale = 1.0
    skipped_steps = 0
    last_step_skipped = False
    last_overflow: Overflow | None = None
    overflows: tuple[Overflow, ...] = ()
    max_consecutive_skips = 50
    late_bound: tuple[str, ...] = ()
    skipped_rules: tuple[CastRule, ...] = ()

    def __init__(self) -> None:
        self._casts = Casts(torch.float16, "cpu", enable_caching=False, on=False)
        self._followers = Followers()
        self._steps: Any = None

    def __repr__(self) -> str:
        return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"

    @property
    def backend(self) -> Backend:
        """No kernels."""
        return Backend("cpu", False, "autoamp is not enabled")

    @property
    def cache(self) -> CastCache:
        """A cache that stays empty."""
        return self._casts.cache

    def scale_loss(
        self, loss: Any, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager over ``loss`` as it is."""
        return contextlib.nullcontext(loss)

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

    def trace(self, *, profile: bool = False) -> CastTrace:
        """Return a trace in which nothing is cast."""
        return CastTrace(self._casts, Observation(self._casts), self.observe, profile=profile)

    def profile_ranges(self, *, every: int = 1, compare: int = 2) -> RangeProfile:
        """Profile the ranges of values and gradients, as a handle does."""
        return RangeProfile(
            self._casts, Observation(self._casts), self.observe, lambda: 1.0, every=every, compare=compare
        )

    def record(self, *, sample: bool = True, times: bool = True) -> Watch:
        """Record nothing: nothing is cast or skipped."""
        return Watch(lambda: None)

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return an empty report, and write nothing."""
        return {}

    def explain(self, name: str) -> Explanation:
        """Tell that no rule applies to an op. UsageError: torch has no op of this name."""
        return explain(CastTable(), name)

    def explain_overflow(self, step_fn: Callable[[], Any]) -> None:
        """Return None, and run nothing: no half precision is there to overflow."""

    @property
    def stats(self) -> dict[str, Any]:
        """What a handle tells that has scaled nothing; steps are not counted."""
        return {
            "loss_scale": 1.0, "loss_scales": [], "found_inf": [], "steps": 0, "skipped": 0,
            "last_step_skipped": False, "casts": {}, "overflows": {},
        }  # fmt: skip

    def postfix(self) -> dict[str, str]:
        """Return what ``tqdm.set_postfix`` takes: a loss scale of 1, and no skip."""
        return {"scale": "1", "skipped": "0"}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write nothing: no scale moves, and no step is skipped. What is returned does nothing."""
        return lambda: None

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers, averages and the like after each step of any optimizer, all of which land.

        Returns:
            What ends it, as `deactivate` does.

        Raises:
            UsageError: One of them cannot be stepped.
        """
        end = self._followers.follow(followers)
        if self._steps is None:
            self._steps = register_optimizer_step_post_hook(lambda *_: self._followers.stepped(lambda: False))
        return end

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
        """Step followers no more; there is nothing else to take back."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state: a run without scaling has no use for it."""


@contextlib.contextmanager
def _unscaled(loss: Any, *, delay_unscale: bool = False) -> Iterator[Any]:
    yield loss
