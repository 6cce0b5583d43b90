"""The handle without mixed precision, with which a program runs unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoamp.auto_scaling import AutoScale
from autoamp.diagnostics import Followers, Overflow, ReportRecording
from autoamp.kernels import Backend
from autoamp.program import listen
from autoamp.rules import CastTable
from autoamp.runtime.handle import BaseHandle
from autoamp.runtime.runtime import Runtime
from autoamp.runtime.settings import Settings
from autoamp.stepping import Step, as_list, stepped_params


class NoOpHandle(BaseHandle):
    """The handle that ``init(enabled=False)`` returns. It casts nothing and scales nothing."""

    def __init__(self) -> None:
        super().__init__(Settings("cpu", torch.float16, CastTable(), loss_scale=1.0))
        self._listening = contextlib.ExitStack()

    @property
    def _active_runtime(self) -> Runtime:
        return self._runtime

    def __repr__(self) -> str:
        return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"

    def deactivate(self) -> tuple[str, ...]:
        """Call the functions of `follow` no more."""
        self._listening.close()
        return super().deactivate()

    def record(self, *, sample: bool = True) -> ReportRecording:
        """Return a recording that has ended."""
        recording = self._runtime.recording = ReportRecording(self._runtime, sample=sample)
        recording.stop()
        return recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return ``{}``, and write no file."""
        return {}

    @property
    def backend(self) -> Backend:
        """None: torch's own functions compute optimizer steps."""
        return Backend("cpu", False, "autoamp is not enabled")

    @property
    def stats(self) -> dict[str, Any]:
        """The keys of an enabled handle, without any loss."""
        return {**super().stats, "loss_scales": [], "found_inf": []}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write nothing."""
        return lambda: None

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers or averages of weights after each step of an optimizer of torch: none is skipped."""
        calls = Followers()
        calls.follow(followers)
        listening = listen(optimizer_returned=lambda *_: calls.step_ended(Step()))
        return self._listening.enter_context(listening).close

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Return None."""

    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Yield the unchanged loss."""
        return contextlib.nullcontext(loss)

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, and return the norm before that."""
        params = [param for optimizer in as_list(optimizers) for param in stepped_params(optimizer)]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Do nothing: no step is skipped."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` that yields the unchanged loss, and return the optimizer."""
        optimizer.scale_loss = lambda loss, delay_unscale=False: contextlib.nullcontext(loss)
        return optimizer

    def auto_scale(self) -> AutoScale:
        """Return an object that was not started."""
        return self._runtime.auto_scaling

    def state_dict(self) -> dict[str, Any]:
        """Return ``{}``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""
