"""What a handle drives: the patches of torch, the casts, the models that were set up, and the guarded optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from autoamp.core.auto_scale import AutoScale
from autoamp.core.autocast_regions import AutocastRegions
from autoamp.core.casts import CastState
from autoamp.core.guarded_optimizers import GuardedOptimizers
from autoamp.core.half_models import CastModels
from autoamp.core.loss_scale import LossScaler, make_scaler
from autoamp.core.module_calls import ModuleCalls
from autoamp.core.nonfinite import NonFiniteSteps
from autoamp.core.optimizer_steps import OptimizerSteps
from autoamp.core.patch_sites import Parts
from autoamp.core.patched_torch import PatchedTorch
from autoamp.core.precisions import ModulePrecisions
from autoamp.core.scope import ModuleCasts
from autoamp.core.settings import Settings
from autoamp.core.targets import Target
from autoamp.errors import UsageError

suspended: list[Callable[[], object]] = []
"""Called when the patches of the active handle are about to be taken back, for a while or for good."""


class Looks:
    """What looks on at one handle: here nothing does."""

    def begin(self, runtime: Runtime) -> None:
        """Look on at a handle, or at the casts that it has got anew."""

    def stop(self) -> None:
        """Torch is about to be restored for good."""

    def end(self) -> None:
        """Torch was restored for good."""


class Runtime:
    """The state of a handle: the patches of torch, the casts, and the models and optimizers that were set up.

    Attributes:
        settings: The settings of the handle.
        precisions: Which modules run in a precision of their own.
        models: The models that it set up: those in half precision, and those whose inputs or outputs are cast.
        optimizers: The optimizers that it guards, and the loss scalers.
        patched: The patches of torch.
        ended: Whether ``deactivate`` was called. A suspended runtime may be activated again.
        setups: What `initialize` keeps of the call that set up each model, in the order of the calls.
        nonfinite: Checks steps without a loss scale.
        looks: What looks on.
        auto_scaling: What `Handle.auto_scale` starts.
    """

    def __init__(self, settings: Settings, looks: Looks, *, on: bool, scalers: Sequence[LossScaler] | None) -> None:
        self.precisions = ModulePrecisions()
        self.models = CastModels()
        self.optimizers = GuardedOptimizers(
            _casts_for(settings, on), scalers or [make_scaler(settings.loss_scale, settings.dtype)]
        )
        self.optimizers.facts = lambda: (self.settings.facts(), self.settings.rules())
        self.auto_scaling = AutoScale(self.optimizers)
        self.patched = PatchedTorch(self.optimizers)
        self.looks = looks
        self._apply(settings)
        self.ended = False
        self.setups: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self.precisions.use(settings.table.modules)
        self.nonfinite = NonFiniteSteps(self.optimizers, settings.on_nonfinite)
        calls = ModuleCalls(self.casts, self.precisions, self.models.forward_dtypes, self.optimizers.listeners)
        self.optimizers.sites.parts = Parts(
            calls,
            self.models,
            AutocastRegions(self.casts, goes_on=settings.half_table is None),
            OptimizerSteps(self.optimizers, self.auto_scaling),
            self.auto_scaling,
            self.nonfinite,
        )
        self.optimizers.current.refuses, self.optimizers.current.after = self.nonfinite.refuses_step, calls.step_ended
        self.looks.begin(self)

    @property
    def casts(self) -> CastState:
        """The casting state."""
        return self.optimizers.casts

    def check_active(self) -> None:
        """Raise `UsageError` where the patches are not in place."""
        if not self.patched.in_place:
            raise UsageError("this handle is not active; call autoamp.init() and use the handle that it returns")

    def activate(self, registered: tuple[Target, ...] = ()) -> None:
        """Put the patches in place. If one fails torch is left as it was. `ActiveHandles` calls this."""
        self.patched.patch(self.settings, registered)
        self.ended = False

    def suspend(self) -> tuple[str, ...]:
        """Restore torch and keep the rest, so that ``activate`` can go on where this handle stopped."""
        if not self.patched.in_place:
            return ()
        for listener in suspended.copy():
            listener()
        for closed in self.optimizers.listeners.closed:
            closed()
        return self.patched.restore()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        foreign = self._end_looks()
        self.ended = True
        self.precisions.undo_all()
        self.optimizers.release()
        self.models.let_go()
        return foreign

    def _end_looks(self) -> tuple[str, ...]:
        """End what looks on, and auto scaling; restore torch."""
        self.auto_scaling.stop()
        self.looks.stop()
        foreign = self.suspend()
        self.looks.end()
        return foreign

    def grow(self, settings: Settings, models: Sequence[Module], optimizers: Sequence[Any], *, on: bool) -> None:
        """Prepare for another call of `initialize`. Torch is restored until the handle is activated again.

        Args:
            settings: What all calls agree on, from now on.
            models: The models of the new call. The setup of those that an earlier call set up is undone.
            optimizers: Its optimizers.
            on: Whether casts act everywhere.
        """
        self._end_looks()
        named = {module for model in models for module in model.modules()}
        # Models that an earlier call has cast and that have a module in common with these are let go as a whole.
        cast = [model for model in self.setups if self.models.forward_dtypes.get(model) is not None]
        modules = named.union(*(model.modules() for model in cast if not named.isdisjoint(model.modules())))
        # Parameters that these share with another half model stay half.
        shared = {id(param) for model in self.models.halves if model not in modules for param in model.parameters()}
        params = {id(param): param for module in modules for param in module.parameters(recurse=False)}
        self.precisions.undo_all(modules)
        self.optimizers.let_go(optimizers, [param for key, param in params.items() if key not in shared])
        self.models.let_go(modules)
        self.optimizers.casts = _casts_for(settings, on)
        self._apply(settings)
        self.optimizers.models_with_masters.clear()


def _casts_for(settings: Settings, on: bool) -> CastState:
    kind = functools.partial(CastState, on=on) if settings.scope == "global" else ModuleCasts
    return kind(settings.dtype, settings.device_type, enable_caching=settings.enable_caching)
