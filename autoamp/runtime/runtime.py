"""What a handle drives: the patches of torch, the casts, the models that were set up, and the guarded optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastState
from autoamp.diagnostics import (
    CapsuleWriter,
    Counts,
    Followers,
    HalfLosses,
    NonFiniteSteps,
    Observation,
    OverflowTrace,
    ReportRecording,
)
from autoamp.errors import UsageError
from autoamp.modules import CastModels, ModuleCalls, ModuleCasts, ModulePrecisions
from autoamp.ops import AutocastRegions, Target
from autoamp.runtime.patched_torch import PatchedTorch
from autoamp.runtime.settings import Settings
from autoamp.scaling import LossScaler, make_scaler
from autoamp.stepping import GuardedOptimizers, OptimizerSteps

suspended: list[Callable[[], object]] = []
"""Called when the patches of the active handle are about to be taken back, for a while or for good."""


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
        observation: The observers of patched functions.
        nonfinite: Checks steps without a loss scale.
        overflows: Explains skipped steps, all of them with ``trace_overflow=True``.
        half_losses: Looks for losses that make no inf, for more than this handle; None where a recording makes its own.
        recording: What `Handle.record` began last; None before.
        call_counts: What `Handle.count` began last; None before.
        followers: Functions that are called after steps of guarded optimizers.
        auto_scaling: What `Handle.auto_scale` starts.
    """

    def __init__(self, settings: Settings, *, on: bool, scalers: Sequence[LossScaler] | None) -> None:
        self.precisions = ModulePrecisions()
        self.models = CastModels()
        self.optimizers = GuardedOptimizers(
            _casts_for(settings, on), scalers or [make_scaler(settings.loss_scale, settings.dtype)]
        )
        self.optimizers.facts = lambda: (self.settings.facts(), self.settings.rules())
        self.followers = Followers()
        self.auto_scaling = AutoScale(self.optimizers)
        self.patched = PatchedTorch(self.optimizers)
        self._apply(settings)
        self.call_counts: Counts | None = None
        self.half_losses: HalfLosses | None = None
        self.recording: ReportRecording | None = None
        self.ended = False
        self.setups: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self.precisions.use(settings.table.modules)
        observation = Observation(self.casts, self.patched.patch_anew)
        self.overflows = OverflowTrace(self.casts, observation, always=settings.trace_overflow)
        if settings.capsule is not None:
            self.overflows.capsules = CapsuleWriter(settings.capsule)
        self.nonfinite = NonFiniteSteps(self.optimizers, self.overflows, settings.on_nonfinite)
        recorder = self.overflows.recorder
        # The order in which an event is heard. Wrappers are nested so, the first outermost.
        self.optimizers.program.subscribe(
            # Knows a module's call before the casts in it.
            self.observation,
            ModuleCalls(self.casts, self.precisions, self.models.forward_dtypes, recorder),
            self.models,
            AutocastRegions(self.casts, goes_on=not settings.casts_models),
            # Gives a new optimizer its masters before it is guarded.
            OptimizerSteps(self.optimizers),
            # Multiplies the gradients of a backward pass before the recorder sees them.
            self.auto_scaling,
            recorder,
            self.overflows,
            self.nonfinite,
            # After all that counts or changes a step.
            self.followers,
        )

    @property
    def observation(self) -> Observation:
        """The observers of patched functions."""
        return self.overflows.observation

    @property
    def casts(self) -> CastState:
        """The casting state."""
        return self.optimizers.casts

    def check_active(self) -> None:
        """Raise `UsageError` where the patches are not in place."""
        if not self.patched.in_place:
            raise UsageError("this handle is not active; call autoamp.init() and use the handle that it returns")

    def new_recording(self, *, sample: bool) -> ReportRecording:
        """Return a recording that has not begun; see `Handle.record`."""
        half_losses = self.half_losses or HalfLosses()
        return ReportRecording(
            self.optimizers, self.overflows, self.followers, half_losses, self.models.buffer_losses, sample=sample
        )

    def activate(self, registered: tuple[Target, ...] = ()) -> None:
        """Put the patches in place. If one fails torch is left as it was. `ActiveHandles` calls this."""
        self.patched.patch(self.settings, self.observation, registered)
        self.ended = False

    def suspend(self) -> tuple[str, ...]:
        """Restore torch and keep the rest, so that ``activate`` can go on where this handle stopped."""
        if not self.patched.in_place:
            return ()
        for listener in suspended.copy():
            listener()
        self.overflows.close()
        return self.patched.restore()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        foreign = self._end_diagnostics()
        self.ended = True
        self.precisions.undo_all()
        self.optimizers.release()
        self.models.let_go()
        return foreign

    def _end_diagnostics(self) -> tuple[str, ...]:
        """End what looks on, and auto scaling; restore torch."""
        self.auto_scaling.stop()
        if self.recording is not None:
            self.recording.stop()
        foreign = self.suspend()
        self.observation.end()
        return foreign

    def grow(self, settings: Settings, models: Sequence[Module], optimizers: Sequence[Any], *, on: bool) -> None:
        """Prepare for another call of `initialize`. Torch is restored until the handle is activated again.

        Args:
            settings: What all calls agree on, from now on.
            models: The models of the new call. The setup of those that an earlier call set up is undone.
            optimizers: Its optimizers.
            on: Whether casts act everywhere.
        """
        self._end_diagnostics()
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
