"""Apex's state as code reads and pokes it: views on the active handle, and what Apex had and autoamp has no use for."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed

from autoamp.apex.amp.handle import AmpHandle, amp_handle
from autoamp.apex.amp.properties import Properties, fill
from autoamp.apex.amp.scaler import ScalerView
from autoamp.apex.initialize import master_params
from autoamp.core import current_runtime
from autoamp.errors import UsageError

log = logging.getLogger(__name__)


class AmpState:
    """The object ``amp._amp_state``.

    Attributes:
        verbosity: As given to ``amp.initialize``; what programs write here is read back, and has no effect.
        hard_override, allow_incoming_model_not_fp32: The same.
        min_loss_scale, max_loss_scale: The bounds as given to ``amp.initialize``.
        num_losses: The number of losses of the last ``amp.initialize``, which may share more scalers with earlier ones.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.num_losses: int | None = None
        self._views: tuple[ScalerView, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            raise UsageError(f"amp._amp_state.{name} cannot be set: call amp.initialize, which makes it anew")
        super().__setattr__(name, value)

    @property
    def opt_properties(self) -> Properties:
        """What ``initialize`` came to. ``enabled`` is False before it, and after ``initialize(enabled=False)``."""
        setup, scalers = _latest_setup(), self.loss_scalers
        if setup is None:
            return Properties()
        properties = fill(Properties(), setup.level, setup.settings.dtype)
        properties.loss_scale = "dynamic" if scalers[0].dynamic else scalers[0].loss_scale()
        return properties

    @property
    def handle(self) -> AmpHandle | None:
        """The handle of ``amp.init``, None before."""
        return amp_handle()

    @property
    def loss_scalers(self) -> tuple[ScalerView, ...]:
        """A view of each scaler of the last ``initialize``, the same as long as the scaler is; empty before it."""
        runtime = current_runtime()
        scalers = runtime.optimizers.loss_scalers.latest if runtime is not None else []
        if _latest_setup() is not None:
            scalers = scalers[: self.num_losses]
        known = {id(view._scaler): view for view in self._views}
        self._views = tuple(known.get(id(scaler)) or ScalerView(scaler) for scaler in scalers)
        return self._views


def _latest_setup() -> Any:
    """Return what the last call of `autoamp.initialize` asked for; None without one."""
    runtime = current_runtime()
    return next(reversed([] if runtime is None else list(runtime.setups.values())), None)


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Log a warning where ``_amp_state.hard_override`` is True, else raise RuntimeError."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    log.warning(msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Log a message, which Apex prints, unless ``_amp_state.verbosity`` is 0; with ``rank0`` on rank 0 alone."""
    if _amp_state.verbosity > 0 and not (rank0 and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        log.info(msg)
