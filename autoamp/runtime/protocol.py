"""What every handle offers, whether it casts or not: the type of what `init` returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Self

from torch import Tensor
from torch.nn import Module

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastCache
from autoamp.diagnostics import CastTrace, Counts, Explanation, Observer, Overflow, RangeProfile, Watch
from autoamp.errors import UsageError
from autoamp.kernels import Backend
from autoamp.modules import Override
from autoamp.rules import CastRule

__all__ = ["BaseHandle", "OneToAProcess", "Precision", "Scope"]

Precision = Literal["fp32", "fp16", "none"]
"""What `override` runs a module in."""

Scope = Literal["global", "modules"]
"""Where `init` casts."""


class OneToAProcess:
    """What is not copied, since it belongs to the process: a copy of what refers to it refers to the same."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a handle cannot be pickled: it belongs to the process that patched torch; save its state_dict(), and call "
            "init() or initialize() in the other process"
        )


class BaseHandle(Protocol):
    """The surface that `Handle` and `NoOpHandle` have in common; `Handle` says what each part does.

    It is what `autoamp.init`, `autoamp.current_handle` and ``with autoamp.region(...)`` are annotated to return: code
    runs unchanged with ``enabled=False``. ``isinstance(handle, autoamp.Handle)`` tells whether anything is cast.
    """

    max_consecutive_skips: int

    @property
    def backend(self) -> Backend:
        """What does the work of a step: compiled kernels, or torch's own functions."""

    @property
    def loss_scale(self) -> float:
        """The current scale of the first loss."""

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped because gradients overflowed."""

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""

    @property
    def late_bound(self) -> tuple[str, ...]:
        """Names that other modules had taken from torch before, and that were rebound."""

    @property
    def skipped_rules(self) -> tuple[CastRule, ...]:
        """Rules of shipped list sets on ops that this torch lacks."""

    @property
    def cache(self) -> CastCache:
        """The cache of parameter casts."""

    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss for its backward pass; see `Handle.scale_loss`."""

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of optimizers by the norm of them all; see `Handle.clip_grad_norm_`."""

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Let all ranks of a process group agree on each step; see `Handle.sync_over`."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` of its own, and return it."""

    def auto_scale(self) -> AutoScale:
        """Scale every ``loss.backward()`` of the program from now on."""

    def count(self) -> Counts:
        """Count the calls of listed functions and what is cast for them."""

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; see `Handle.stats`."""

    def postfix(self) -> dict[str, str]:
        """Return what ``tqdm.set_postfix`` takes."""

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write the loss scale and the skips after each ``every``-th step; see `Handle.log_to`."""

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers, averages and the like after steps that landed; see `Handle.follow`."""

    def observe(self, observer: Observer) -> Watch:
        """Tell an observer of each call of a patched function; see `Handle.observe`."""

    def trace(self, *, profile: bool = False) -> CastTrace:
        """Trace casts within a ``with`` statement; see `Handle.trace`."""

    def profile_ranges(self, *, every: int = 1, compare: int = 2) -> RangeProfile:
        """Profile the ranges of values within a ``with`` statement; see `Handle.profile_ranges`."""

    def record(self, *, sample: bool = True, times: bool = True) -> Watch:
        """Record for `report` from now on; see `Handle.record`."""

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return what was recorded, and write it to a file; see `Handle.report`."""

    def explain(self, name: str) -> Explanation:
        """Tell which rules apply to an op; see `Handle.explain`."""

    @property
    def last_overflow(self) -> Overflow | None:
        """What the last skipped step came from, with ``trace_overflow=True``."""

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """What the last skipped steps came from, with ``trace_overflow=True``."""

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Tell what overflows in a step of the program; see `Handle.explain_overflow`."""

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Turn casts off within a ``with`` statement, on this thread."""

    def inference(self, model: Module) -> contextlib.AbstractContextManager[Module]:
        """Keep the casts of a model's weights for a ``with`` statement."""

    def override(self, module: Module, precision: Precision | None = None) -> Override:
        """Run a module in a precision of its own."""

    def masters_from_model(self) -> None:
        """Set every fp32 master to its half parameter."""

    def is_active(self) -> bool:
        """Tell whether this handle's patches are in place."""

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scalers' state and the number of skipped steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
