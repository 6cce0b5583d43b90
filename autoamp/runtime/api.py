"""`init()` and the functions that act on whichever handle is active."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy
import torch

from autoamp.errors import UsageError
from autoamp.half_units import falls_back_to_fp32
from autoamp.rules import CastPolicy
from autoamp.runtime.active import handles
from autoamp.runtime.handle import BaseHandle, Handle, NoOpHandle
from autoamp.runtime.settings import Scope, Settings, check_device
from autoamp.scaling import LossScaler

__all__ = [
    "check_enabled",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

# What a decorator takes comes back with its own type: its parameters, overloads and descriptors stay known.
_Function = TypeVar("_Function", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")


def init(
    enabled: bool = True,
    loss_scale: float | Literal["dynamic"] | LossScaler | None = None,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = True,
    *,
    lists: Any = None,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    rebind: bool = True,
    scope: Scope = "global",
    trace_overflow: bool = False,
    capsule: str | Path | None = None,
    on_nonfinite: str = "warn",
) -> BaseHandle:
    """Patch torch by the cast lists and return the handle that scales losses.

    A second call with the same arguments returns the same handle. With other arguments the new handle replaces the old
    one. A call that raises an error changes nothing.

    Args:
        enabled: False removes the patches of an earlier call and returns a handle that does nothing.
        loss_scale: A number is static; ``"dynamic"`` or a `LossScaler`. None is dynamic for fp16 and 1.0 for bf16.
        enable_caching: Whether a parameter's cast is cached while the outermost module call runs.
        verbose: Whether to log the number of patches.
        allow_banned: True: a banned function runs in fp32 with a warning. False: it raises.
        lists: A list set's name, a path, a mapping, or a sequence of these. They take precedence over the project's
            lists.
        device_type: Only tensors of this device type are cast. None is that of the current accelerator, else ``"cpu"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``. None is torch's default half dtype for the device type. If the
            device has no units for that, nothing is cast, as with ``enabled=False``, and the log says so.
        rebind: Whether to rebind names that other modules imported earlier (``from torch import matmul``).
        scope: ``"global"``, or ``"modules"`` for code that knows nothing of mixed precision. Ops inside a module call
            are cast, the outputs of the outermost call are fp32, and elsewhere an op is cast only if an argument is in
            the half dtype.
        trace_overflow: Explain each skipped step, in `Handle.last_overflow`; see docs/diagnostics.md. It changes no
            result. A skipped step is run again, forward and backward, some times.
        capsule: A folder. The first step of each cause of inf or nan is written to a file there, for
            ``autoamp replay``, with the weights and inputs of the step. Implies ``trace_overflow``; needs cloudpickle.
        on_nonfinite: What to do with a step that no loss scale guards and whose gradients hold inf or nan: tell of it
            once, raise `NonFiniteGradientsError` before it, or leave it out. The last two wait for a GPU at each step.

    Raises:
        ListFileError: A list cannot be used.
        UsageError: An argument is invalid, or a region with its own handle is open.
        LossScaleError: The loss scale is invalid.
    """
    check_enabled(enabled, "init")
    if not enabled:
        return _put_no_op()
    if verbose:
        _show_log()
    settings = Settings.of(
        lists, device_type, dtype, loss_scale=loss_scale, enable_caching=enable_caching, verbose=verbose,
        allow_banned=allow_banned, rebind=rebind, scope=scope, trace_overflow=trace_overflow, capsule=capsule,
        on_nonfinite=on_nonfinite,
    )  # fmt: skip
    check_device(settings.device_type)
    if falls_back_to_fp32(dtype, settings.device_type):
        return _put_no_op()
    with handles.lock:
        base = handles.base
        if base is not None and base.settings == settings:
            return base
        handle = Handle(settings)
        handles.put_base(handle)
        return handle


def _put_no_op() -> NoOpHandle:
    nothing = NoOpHandle()
    handles.put_base(nothing)
    return nothing


def check_enabled(enabled: Any, caller: str) -> None:
    """Raise UsageError for what is no switch: a string, or a model that was meant for `initialize`."""
    if not isinstance(enabled, (bool, int, numpy.bool_, type(None))):
        raise UsageError(
            f"enabled={_shortened(enabled)} is neither True nor False; settings are given by name, as in "
            f"autoamp.{caller}(dtype=torch.float16), and models and optimizers to autoamp.initialize(model, optimizer)"
        )


def _shortened(value: object) -> str:
    """Return how a value is shown in an error: whole, or by its type where that takes lines."""
    shown = repr(value)
    return shown if len(shown) < 40 and "\n" not in shown else f"a {type(value).__name__}"


def _show_log() -> None:
    """Let ``verbose=True`` be seen in a program that has not set up logging."""
    logger = logging.getLogger("autoamp")
    if not logger.hasHandlers():
        logger.addHandler(_FallbackHandler())
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)


class _FallbackHandler(logging.StreamHandler[Any]):
    """Writes to stderr what no handler of the program's own gets: it may set logging up after `init`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Turn casts off inside a ``with`` statement, in this thread. Without an active handle it does nothing."""
    handle = handles.handle
    return handle.disable_casts() if handle is not None else contextlib.nullcontext()


def half_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to the half dtype. Ops inside it follow the lists.

    Args:
        function: The function or method.

    Raises:
        TypeError: ``function`` is not a function, for example a class, or it runs later, as a generator does.
    """
    decorated: _Function = handles.registry.decorate(function, CastPolicy.FP16)
    return decorated


def float_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to fp32. No op inside it is cast.

    Args:
        function: The function or method.

    Raises:
        TypeError: As for `half_function`.
    """
    decorated: _Function = handles.registry.decorate(function, CastPolicy.FP32)
    return decorated


def promote_function(function: _Function) -> _Function:
    """Decorate a function: its floating arguments are cast to the widest dtype among them.

    Args:
        function: The function or method.

    Raises:
        TypeError: As for `half_function`.
    """
    decorated: _Function = handles.registry.decorate(function, CastPolicy.PROMOTE)
    return decorated


def register_half_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp16` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.FP16)


def register_float_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `fp32` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Put ``module.name`` under the `promote` policy, now and at each later `init`.

    Args:
        module: A module or class.
        name: The name of a function or method in it.

    Raises:
        TargetError: ``module`` has no such name, or it cannot be patched.
    """
    handles.register(module, name, CastPolicy.PROMOTE)
