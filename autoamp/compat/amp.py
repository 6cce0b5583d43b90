"""The functions of `apex.amp`, with its signatures and what its callers pass."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autoamp import levels, runtime
from autoamp.compat.alias import options
from autoamp.compat.state import AmpHandle, AmpStash, Properties, amp_state
from autoamp.errors import UsageError
from autoamp.handle import NoOpHandle

__all__ = ["init", "initialize", "maybe_print", "scale_loss"]

log = logging.getLogger(__name__)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
    opt_level: str | None = None,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: Any = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Set models and optimizers up, as ``apex.amp.initialize`` did; see `autoamp.initialize`.

    The half dtype, the device type and the lists are those that `install_as_apex` was given. ``opt_level`` None is its
    level, ``"O1"`` unless it was told otherwise.
    """
    chosen = options()
    level = opt_level or chosen.opt_level
    result = levels.initialize(
        models, optimizers, enabled, level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32,
        master_weights, loss_scale, cast_model_outputs, num_losses, int(verbosity or 0), min_loss_scale,
        max_loss_scale, dtype=chosen.dtype, device_type=chosen.device_type, lists=list(chosen.lists),
    )  # fmt: skip
    amp_state.verbosity = int(verbosity or 0)
    amp_state.min_loss_scale, amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    amp_state.opt_properties = Properties(level, chosen.dtype)
    amp_state.opt_properties.enabled = runtime.current_handle() is not None
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        if optimizer is not None:
            optimizer._amp_stash = AmpStash(optimizer)
            optimizer._amp_lazy_init = _nothing_left_to_do
    return result


def _nothing_left_to_do() -> None:
    """Masters are made by ``initialize`` itself."""


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass; see `autoamp.scale_loss`.

    Raises:
        UsageError: ``initialize`` was not called before. It is a RuntimeError.
    """
    with levels.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check) as scaled_loss:
        yield scaled_loss


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Patch torch and return the handle of the old API, as ``apex.amp.init`` did; see `autoamp.init`."""
    chosen = options()
    handle = runtime.init(
        enabled, loss_scale, enable_caching, verbose, allow_banned,
        dtype=chosen.dtype, device_type=chosen.device_type, lists=list(chosen.lists),
    )  # fmt: skip
    return AmpHandle(handle, verbose)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Log a message at the verbosity that ``initialize`` was given."""
    if amp_state.verbosity > 0:
        log.info("%s", msg)


def warn_or_err(msg: str) -> None:
    """Warn, or raise where the state says that errors are not overridden, as the internals of Apex did."""
    if amp_state.hard_override:
        warnings.warn(msg, stacklevel=2)
    else:
        raise UsageError(msg)


def no_op_handle() -> AmpHandle:
    """Return the handle of ``init(enabled=False)``."""
    return AmpHandle(NoOpHandle())
