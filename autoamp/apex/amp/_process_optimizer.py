"""``optimizer._amp_stash``, and the methods that ``amp.initialize`` gives an optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from autoamp.apex.amp.scaler import ScalerView
from autoamp.apex.fp16_utils.masters import GroupsOfMasters
from autoamp.core import MasterWeights, OverflowCheck, ScaledBlock, StepGuard, current_runtime
from autoamp.errors import UsageError


class AmpOptimizerState(GroupsOfMasters):
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
        optimizer._master_params_to_model_params = self.round_into_model
        optimizer._prepare_amp_backward, optimizer._post_amp_backward = self.prepare_backward, self.post_backward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to a copy of the optimizer, which has no masters.
        return AmpOptimizerState, ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    @property
    def _masters(self) -> MasterWeights | None:
        runtime, optimizer = current_runtime(), self._optimizer()
        return runtime.optimizers.masters_of(optimizer) if runtime is not None and optimizer is not None else None

    def round_into_model(self) -> None:
        """Write the masters into the half parameters, which each step does by itself."""
        if self._masters is not None:
            self._masters.round_into_model()

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
        if self.params_have_scaled_gradients and guard.grads.group is None:
            # All gradients are of passes since `prepare_backward` was due: those of older checks were dropped.
            guard.grads.resolve()
        (aside, found), self._aside, self._found = (self._aside, self._found), [], []
        # As after ``delay_unscale``: the block takes the gradients for scaled, and unscales them at its end.
        guard.grads.scale = scaler.loss_scale()
        with ScaledBlock([guard], scaler._scaler):
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
