"""Apex's state as code reads and pokes it: `_amp_state`, its scalers, ``optimizer._amp_stash``, the handle of ``init``.

All are views on the active handle. Of their own they have only what Apex had and autoamp has no use for.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp import runtime
from autoamp.apex.amp.properties import Properties, fill
from autoamp.apex.amp.unscaling import UnscalesByHand
from autoamp.apex.early.optimizers import GroupsOfMasters
from autoamp.apex.early.scalers import CurScale
from autoamp.errors import UsageError
from autoamp.runtime import current_handle, current_runtime
from autoamp.scaling import DynamicLossScaler, LossScaler
from autoamp.stepping import MasterWeights, OverflowCheck, StepGuard, read_checks, scaled_block


class _ScalerField:
    """An option of a dynamic scaler by Apex's name. A static one shows ``static``, or what was written to it.

    Args:
        name: The name here, of the attribute and of the argument.
        kind: Its type.
        static: The value of a static scaler.
    """

    def __init__(self, name: str, kind: Callable[[Any], float], static: float | None) -> None:
        self._name, self._kind, self._static = name, kind, static

    def __get__(self, view: ScalerView, _: Any = None) -> float | None:
        return getattr(view._scaler, self._name, vars(view).get(self._name, self._static))

    def __set__(self, view: ScalerView, value: Any) -> None:
        if isinstance(view._scaler, DynamicLossScaler):
            value = self._kind(value)
            DynamicLossScaler(1.0, **{self._name: value})  # refuses what no scaler takes
            setattr(view._scaler, self._name, value)
        else:
            vars(view)[self._name] = value


class ScalerView(UnscalesByHand):
    """One loss scaler, by the names of Apex. Writing ``_loss_scale`` takes effect.

    Args:
        scaler: The scaler of autoamp that this is a view on.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    @functools.cached_property
    def _overflow_buf(self) -> Tensor:
        handle = current_handle()
        # A program may put another tensor in its place. It writes to this one after an evaluation too.
        with torch.inference_mode(False):
            return torch.zeros(1, dtype=torch.int, device="cpu" if handle is None else handle.settings.device_type)

    def loss_scale(self) -> float:
        """Return the scale for the next loss."""
        return self._scaler.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return isinstance(self._scaler, DynamicLossScaler)

    _loss_scale = CurScale.cur_scale

    @property
    def _unskipped(self) -> int:
        return self._scaler.unskipped

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._scaler.load_state_dict({"loss_scale": self._scaler.loss_scale, "unskipped": int(count)})

    _scale_seq_len = _ScalerField("growth_interval", int, 2000)
    _max_loss_scale = _ScalerField("max_loss_scale", float, None)
    _min_loss_scale = _ScalerField("min_loss_scale", float, None)

    @property
    def _has_overflow(self) -> bool:
        handle, pending = current_handle(), self._pending()
        if pending:
            return any(check.overflowed for check in pending)
        return handle is not None and handle.last_step_skipped

    def clear_overflow_state(self) -> None:
        """Forget an overflow that was put into ``_overflow_buf``."""
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Move the scale by what this step's gradients were found to be, and tell whether the step is to be skipped.

        For programs that check gradients themselves, between `scale_loss` and ``optimizer.step()``: an overflow that
        they put into ``_overflow_buf`` counts too. Elsewhere the scale moves at the step, and need not be asked to.
        """
        pending = [check for check in self._pending() if check.reported.told is None]
        noted = "_overflow_buf" in vars(self) and bool(self._overflow_buf.any())
        if not pending and not noted:
            return self._has_overflow
        overflow = noted or any(check.overflowed for check in pending)
        self._scaler.update(overflow)
        for check in pending:
            # The step does not tell the scaler again.
            check.reported.told = True
        return overflow

    def _pending(self) -> list[OverflowCheck]:
        """Return the checks of gradients of this scaler since the last step. Waits for the device."""
        runtime = current_runtime()
        guards = [] if runtime is None else runtime.optimizers.guards
        pending = [check for guard in guards for check in guard.grads.checks if check.scaler is self._scaler]
        read_checks(pending)
        return pending


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


amp_state = AmpState()


class AmpStash(GroupsOfMasters):
    """The object ``optimizer._amp_stash``: which parameters have masters. Other names may be written to it.

    Args:
        optimizer: Referred to weakly. Without one there are no parameters.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self.lazy_init_called = True
        self.params_have_scaled_gradients = False
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._found: list[OverflowCheck] = []

    def attach(self, optimizer: Any) -> None:
        """Give the optimizer this stash and the methods that Apex gave it."""
        optimizer._amp_stash = self
        # `initialize` itself has made the masters.
        optimizer._amp_lazy_init = optimizer._lazy_init_maybe_master_weights = lambda: None
        optimizer._master_params_to_model_params = self.copy_down
        optimizer._prepare_amp_backward, optimizer._post_amp_backward = self.prepare_backward, self.post_backward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to a copy of the optimizer, which has no masters.
        return AmpStash, ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    @property
    def _masters(self) -> MasterWeights | None:
        runtime, optimizer = current_runtime(), self._optimizer()
        return runtime.optimizers.masters_of(optimizer) if runtime is not None and optimizer is not None else None

    def copy_down(self) -> None:
        """Write the masters into the half parameters, which each step does by itself."""
        if self._masters is not None:
            self._masters.copy_down()

    def prepare_backward(self) -> None:
        """Put gradients aside before a backward pass whose loss the program scales itself, in place of `scale_loss`.

        Raises:
            UsageError: A ``scale_loss`` block is open, or there was no ``initialize``.
        """
        guard = self._guard("_prepare_amp_backward")
        if self.params_have_scaled_gradients or self._aside:
            return
        # Gradients of half parameters become their masters', so each is put aside once.
        guard.grads.collect()
        guard.grads.resolve_dropped_grads()
        self._aside = [(param, param.grad) for param in guard.grads.params() if param.grad is not None]
        # Checks of these gradients are put aside too: the block of `post_backward` sees other gradients.
        self._found, guard.grads.checks = guard.grads.checks, []
        for param in [*guard.grads.params(), *self.all_fp16_params]:
            param.grad = None

    def post_backward(self, scaler: ScalerView) -> None:
        """Unscale and check the gradients of such a pass, and add what was put aside. The step heeds what was found.

        Args:
            scaler: One of ``amp._amp_state.loss_scalers``; the loss was multiplied by its ``loss_scale()``.

        Raises:
            UsageError: A ``scale_loss`` block is open, or there was no ``initialize``.
        """
        guard = self._guard("_post_amp_backward")
        (aside, found), self._aside, self._found = (self._aside, self._found), [], []
        # As after ``delay_unscale``: the block takes the gradients for scaled, and unscales them at its end.
        guard.grads.scale = scaler.loss_scale()
        with scaled_block([guard], scaler._scaler):
            pass
        for param, grad in aside:
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        guard.grads.collect()
        guard.grads.checks = [*found, *guard.grads.checks]

    def _guard(self, name: str) -> StepGuard:
        runtime, optimizer = current_runtime(), self._optimizer()
        if runtime is None or optimizer is None:
            raise UsageError(f"optimizer.{name}() was called before amp.initialize; call that first")
        guard = runtime.optimizers.guard(optimizer)
        if guard.in_block:
            raise UsageError(f"optimizer.{name}() was called inside a scale_loss block, which does all of it; drop it")
        return guard


class AmpHandle:
    """The handle of the old API, by its names; all other names are those of `autoamp.Handle`.

    Args:
        handle: What `autoamp.init` returned.
        verbose: As given to ``amp.init``.
    """

    def __init__(self, handle: runtime.BaseHandle, verbose: bool = False) -> None:
        self._handle = handle
        self.verbose = verbose

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give the optimizer a ``scale_loss`` of its own; see `autoamp.Handle.wrap_optimizer`."""
        return self._handle.wrap_optimizer(optimizer, num_loss)

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept while a module call runs."""
        return self._handle.is_active() and self._handle.cache.enabled

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


class NoOpHandle(AmpHandle):
    """The handle of ``init(enabled=False)``: the surface of the other, with nothing behind it."""

    def __init__(self) -> None:
        super().__init__(runtime.NoOpHandle())


def amp_handle() -> AmpHandle | None:
    """Return the active handle by the names of Apex, None before ``amp.init``, `autoamp.init` and the like."""
    handle = current_handle()
    return AmpHandle(handle, handle.settings.verbose) if handle is not None else None
