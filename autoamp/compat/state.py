"""Apex's state as code reads and pokes it: `_amp_state`, its scalers, ``optimizer._amp_stash``, the handle of ``init``.

All are views on the active handle. They hold nothing but what Apex had and autoamp has no use for.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import CastCache
from autoamp.handle import Handle, NoOpHandle
from autoamp.levels import LEVELS
from autoamp.runtime import current_handle
from autoamp.scaling import DynamicLossScaler, LossScaler
from autoamp.tensors import HALF_DTYPES

__all__ = ["AmpHandle", "AmpStash", "AmpState", "Properties", "ScalerView", "amp_handle", "amp_state"]


class Properties:
    """What an opt level came to, by the names of Apex."""

    def __init__(self, level: str = "O1", half: torch.dtype = torch.float16) -> None:
        properties = LEVELS[level]
        cast = half if properties.cast_model_type == "half" else properties.cast_model_type
        self.enabled = True
        self.opt_level = level
        self.cast_model_type = cast
        self.patch_torch_functions = properties.patch_torch_functions
        self.keep_batchnorm_fp32 = properties.keep_batchnorm_fp32 if cast in HALF_DTYPES else None
        self.master_weights = properties.master_weights
        self.loss_scale = "dynamic" if properties.loss_scale is None else properties.loss_scale
        self.cast_model_outputs: torch.dtype | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The properties as a dict, as Apex kept them."""
        return dict(vars(self))


class ScalerView:
    """One loss scaler, by the names of Apex. Writing ``_loss_scale`` takes effect."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def loss_scale(self) -> float:
        """Return the scale for the next loss."""
        return self._scaler.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return isinstance(self._scaler, DynamicLossScaler)

    @property
    def _loss_scale(self) -> float:
        return self._scaler.loss_scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._load(float(scale), self._scaler.unskipped)

    @property
    def _unskipped(self) -> int:
        return self._scaler.unskipped

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._load(self._scaler.loss_scale, int(count))

    @property
    def _scale_seq_len(self) -> int:
        return self._scaler.growth_interval if isinstance(self._scaler, DynamicLossScaler) else 0

    @_scale_seq_len.setter
    def _scale_seq_len(self, steps: int) -> None:
        if isinstance(self._scaler, DynamicLossScaler):
            self._scaler.growth_interval = int(steps)

    @property
    def _has_overflow(self) -> bool:
        handle = current_handle()
        return handle is not None and handle.last_step_skipped

    def update_scale(self) -> bool:
        """Tell whether the last step was skipped. The scale itself moves at ``optimizer.step()``."""
        return self._has_overflow

    def _load(self, scale: float, unskipped: int) -> None:
        self._scaler.load_state_dict({"loss_scale": scale, "unskipped": unskipped})

    def __getattr__(self, name: str) -> Any:
        # `min_loss_scale`, `max_loss_scale` and what else the scaler has of its own.
        return getattr(self._scaler, name)


class AmpState:
    """The object ``amp._amp_state``."""

    def __init__(self) -> None:
        self.opt_properties: Any = None
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24

    @property
    def handle(self) -> AmpHandle | None:
        """The handle of ``amp.init``, None before."""
        return amp_handle()

    @property
    def loss_scalers(self) -> list[ScalerView]:
        """A view of each loss's scaler; empty before ``initialize``."""
        handle = current_handle()
        return [ScalerView(scaler) for scaler in handle.optimizers.scalers] if handle is not None else []


amp_state = AmpState()


class AmpStash:
    """The object ``optimizer._amp_stash``: which parameters have masters."""

    lazy_init_called = True

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to a copy of the optimizer, which has no masters.
        return AmpStash, ()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        handle, optimizer = current_handle(), self._optimizer()
        masters = handle.optimizers.masters_of(optimizer) if handle is not None and optimizer is not None else None
        return [] if masters is None else masters.pairs

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half parameters of the model."""
        return [half for half, _ in self._pairs()]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters, in the same order."""
        return [master for _, master in self._pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Parameters that are stepped themselves."""
        optimizer = self._optimizer()
        masters = {id(master) for _, master in self._pairs()}
        groups = optimizer.param_groups if optimizer is not None else []
        return [param for group in groups for param in group["params"] if id(param) not in masters]


class AmpHandle:
    """The handle of the old API, by its names; all else is the native handle's.

    Args:
        handle: What `autoamp.init` returned.
        verbose: As given to ``amp.init``.
    """

    def __init__(self, handle: Handle | NoOpHandle, verbose: bool = False) -> None:
        self._handle = handle
        self.verbose = verbose

    def scale_loss(self, loss: Tensor, optimizer: Any, **options: Any) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss for its backward pass; see `autoamp.Handle.scale_loss`."""
        return self._handle.scale_loss(loss, optimizer, **options)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give the optimizer a ``scale_loss`` of its own; see `autoamp.Handle.wrap_optimizer`."""
        return self._handle.wrap_optimizer(optimizer, num_loss)

    def is_active(self) -> bool:
        """Tell whether torch is patched."""
        return self._handle.is_active()

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept while a module call runs."""
        return self._handle.cache.enabled

    @property
    def cache(self) -> CastCache:
        """The casts of parameters that are kept."""
        return self._handle.cache

    def remove_cache(self, param: Tensor) -> None:
        """Drop the cast of a parameter, and with it all others: each is made again at its next use."""
        self._handle.cache.clear()

    def _clear_cache(self) -> None:
        self._handle.cache.clear()

    def _deactivate(self) -> None:
        self._handle.deactivate()

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return self._handle.disable_casts()

    def __getattr__(self, name: str) -> Any:
        if name == "_handle":
            raise AttributeError(name)
        return getattr(self._handle, name)


def amp_handle() -> AmpHandle | None:
    """Return the active handle by the names of Apex, None before ``amp.init``, `autoamp.init` and the like."""
    handle = current_handle()
    return AmpHandle(handle, handle.settings.verbose) if handle is not None else None
