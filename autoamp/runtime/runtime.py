"""What a handle drives: the patches of torch, the casts, the models that were set up, and the guarded optimizers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.auto_scaling import AutoScale
from autoamp.casting import Casts
from autoamp.diagnostics import (
    CapsuleWriter,
    CastTrace,
    Counts,
    Followers,
    NonFiniteSteps,
    Observation,
    Observer,
    OverflowTrace,
    Recording,
    Watch,
)
from autoamp.errors import UsageError, warn_user
from autoamp.modules import CastModels, ModuleCasts, ModulePrecisions
from autoamp.ops import Target, expand
from autoamp.rules import CastRule
from autoamp.runtime.events import activated, suspended
from autoamp.runtime.installation import Installation
from autoamp.runtime.settings import Settings, Setup
from autoamp.scaling import LossScaler, make_scaler
from autoamp.stepping import ClippingWatch, GuardedOptimizers, OptimizerSteps, scaled_params, stepped_params
from autoamp.tensors import HALF_DTYPES

__all__ = ["Runtime", "kind_of"]

log = logging.getLogger(__name__)


class Runtime:
    """Patched torch, and the loss scaling that goes with it. One serves each `Handle`; one of them is active at a time.

    Attributes:
        settings: What it was made with.
        handle: The handle that it serves, which listeners of events get.
        casts: The casting state.
        precisions: Which modules run in a precision of their own.
        models: The models that it set up: those in half precision, and those whose inputs or outputs are cast.
        optimizers: The optimizers that it guards, and the loss scalers.
        skipped_rules: Rules of shipped list sets on ops that this torch lacks.
        ended: Whether ``deactivate`` was called; one that was only suspended may come back.
        setups: The calls of `initialize` that it serves, in their order.
        observation: Who looks on at the calls of patched functions.
        nonfinite: Looks at steps that no loss scale guards.
        overflows: Explains skipped steps, all of them with ``trace_overflow=True``.
        recording: What `Handle.record` began last; None before.
        counts: What `Handle.count` began last; None before.
        followers: What is told of steps.
        auto_scaling: What `Handle.auto_scale` began last; None before.
    """

    def __init__(self, settings: Settings, handle: Any, *, on: bool, scalers: Sequence[LossScaler] | None) -> None:
        self.handle = handle
        self.models = CastModels()
        self._cast_by(settings, on)
        self.optimizers = GuardedOptimizers(self.casts, scalers or [make_scaler(settings.loss_scale, settings.dtype)])
        self.optimizers.runtime, self.optimizers.watch = self, self.overflows
        self.nonfinite = NonFiniteSteps(self.optimizers, settings.on_nonfinite)
        self.followers = Followers()
        self.skipped_rules: tuple[CastRule, ...] = ()
        self._installation: Installation | None = None
        self._steps = OptimizerSteps(self.optimizers)
        self._step_hooks: list[Any] = []
        self._classes_checked = False
        self._registered: list[Target] = []
        self.auto_scaling: AutoScale | None = None
        self.counts: Counts | None = None
        self.recording: Recording | None = None
        self.ended = False
        self.setups: list[Setup] = []

    def _cast_by(self, settings: Settings, on: bool) -> None:
        self.settings = settings
        what, caching = (settings.dtype, settings.device_type), settings.enable_caching
        if settings.scope == "modules":
            by_module = ModuleCasts(*what, enable_caching=caching)
            by_module.on_left = self._leave_scaling_to
            self.casts: Casts = by_module
        else:
            self.casts = Casts(*what, enable_caching=caching, on=on)
        self.precisions = ModulePrecisions(settings.table.modules)
        self.observation = Observation(self.casts)
        self.overflows = OverflowTrace(self.casts, self.observation.unobserved, always=settings.trace_overflow)
        if settings.capsule is not None:
            kept = replace(settings, capsule=None, loss_scale=None)
            self.overflows.capsules = CapsuleWriter(settings.capsule, kept, self.precisions.of)

    def is_active(self) -> bool:
        """Tell whether the patches are in place."""
        return self._installation is not None

    def check_active(self) -> None:
        """Raise `UsageError` where the patches are not in place, though the settings ask for them."""
        if self.settings.enabled and not self.is_active():
            raise UsageError("this handle is not active; call autoamp.init() and use the handle that it returns")

    def activate(self, registered: tuple[Target, ...] = ()) -> None:
        """Put the patches in place. Where one fails torch is left as it was. Called by ``init`` and ``region``."""
        self._patch_torch(registered)
        self.ended = False
        try:
            activated.tell(self.handle)
        except BaseException:
            self.suspend()
            raise

    def suspend(self) -> tuple[str, ...]:
        """Restore torch and keep the rest, so that ``activate`` can go on where this handle stopped."""
        if not self.is_active():
            return ()
        suspended.tell(self.handle)
        self.overflows.close()
        return self._restore_torch()

    def install_anew(self) -> None:
        """Take the patches back and put them in place again, as the state of the handle asks for now."""
        if self.is_active():
            self._restore_torch()
            self._patch_torch(self._registered)

    def _patch_torch(self, registered: Sequence[Target]) -> None:
        expansion = expand(self.settings.table)
        keeps_masters = any(setup.masters for setup in self.setups)
        installation = Installation(
            self.casts,
            self.precisions,
            self.models,
            allow_banned=self.settings.allow_banned,
            rebind=self.settings.rebind,
            observation=self.observation if self.observation.observers else None,
            met=self._meet if keeps_masters else None,
            clipping=ClippingWatch(lambda: scaled_params(self.optimizers)),
            recorder=self.overflows.recorder,
            builders=[*self.overflows.recorder.builders(), *self.nonfinite.own_scaler.builders()],
        )
        self.casts.open()
        try:
            installation.install(expansion, tuple(registered))
        except BaseException:
            self.casts.shut()
            raise
        self._installation = installation
        self._registered = list(registered)
        self.skipped_rules = expansion.skipped
        self._steps.start(installation.patches)
        # After the hook that ends a rehearsed step.
        self.nonfinite.start()
        if self.settings.table.modules:
            self._step_hooks.append(register_optimizer_step_pre_hook(lambda *_: self._check_classes()))
        if isinstance(self.casts, ModuleCasts):
            note_step = self.casts.note_step
            self._step_hooks.append(register_optimizer_step_pre_hook(lambda *_: note_step()))
        if self.auto_scaling is not None:
            self.auto_scaling.resume()
        log.log(
            logging.INFO if self.settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            self.settings.dtype, self.settings.device_type, len(expansion.targets), len(self.late_bound),
            len(self.skipped_rules),
        )  # fmt: skip

    def _check_classes(self) -> None:
        """At the first step, warn of classes in lists that waited for their definition: what trains is defined now."""
        if not self._classes_checked:
            self._classes_checked = True
            for message in self.precisions.missing_classes():
                warn_user(f"a rule has no effect: {message}")

    def unmatched_rules(self) -> dict[str, str]:
        """Return what of the user's lists has had no effect so far, by name, each with a message for the user."""
        waiting = () if self._installation is None else self._installation.waiting
        ops = [rule for rule in waiting if not rule.origin.shipped]
        unmet = {rule.target: f"{rule.target!r} ({rule.origin}) names nothing that was imported" for rule in ops}
        return {**unmet, **self.precisions.unmatched()}

    def _restore_torch(self) -> tuple[str, ...]:
        installation, self._installation = self._installation, None
        if installation is None:
            # Another thread has restored it since.
            return ()
        if self.auto_scaling is not None:
            self.auto_scaling.pause()
        self.casts.shut()
        self._remove_step_hooks()
        self._steps.stop()
        self.nonfinite.stop()
        return installation.remove()

    def _remove_step_hooks(self) -> None:
        while self._step_hooks:
            self._step_hooks.pop().remove()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        foreign = self._end_diagnostics()
        self.ended = True
        self._remove_step_hooks()
        self.precisions.undo_all()
        self.optimizers.release()
        self.models.restore()
        return foreign

    def _end_diagnostics(self) -> tuple[str, ...]:
        """End what looks on, and auto scaling; restore torch."""
        for begun in (self.auto_scaling, self.recording):
            if begun is not None:
                begun.stop()
        foreign = self.suspend()
        self.observation.end()
        return foreign

    def grow(
        self, settings: Settings, setups: Sequence[Setup], models: Sequence[Module], optimizers: Any, *, on: bool
    ) -> None:
        """Make room for another call of `initialize`. Torch is restored until the handle is activated again.

        Args:
            settings: What all calls agree on, from now on.
            setups: The earlier calls of which something is left.
            models: The models of the new call. What is named again is let go.
            optimizers: Its optimizers.
            on: Whether casts act everywhere.
        """
        self._end_diagnostics()
        self.let_go(models, optimizers)
        precisions, self.setups = self.precisions, list(setups)
        self._cast_by(settings, on)
        self.precisions.join(precisions)
        self.optimizers.casts, self.optimizers.watch = self.casts, self.overflows
        self.nonfinite.action = settings.on_nonfinite
        self.optimizers.masters_for = None
        self.optimizers.loss_scalers.forget_but(scaler for setup in setups for scaler in setup.scalers)

    def let_go(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Give these models, and the optimizers that step their parameters, back what they had."""
        named = [*models, *self.models.overlapping(models)]
        modules = {module for model in named for module in model.modules()}
        # What another model shares with these stays as that one wants it.
        shared = {id(param) for model in self.models.halves() if model not in modules for param in model.parameters()}
        params = {id(param): param for model in named for param in model.parameters() if id(param) not in shared}
        self.precisions.undo_within(modules)
        self.optimizers.let_go(optimizers, params.values())
        self.models.let_go(self.models.overlapping(models))

    def wants_masters(self, optimizer: Any) -> bool:
        """Tell whether an optimizer gets masters: not if all its half parameters are of models that have none."""
        without = self._halves_among(optimizer, masters=False)
        return not without or not all(without)

    def _halves_among(self, optimizer: Any, *, masters: bool) -> list[bool]:
        """Tell of each half parameter of an optimizer whether it is of a model that has masters, or has none."""
        models = [model for setup in self.setups if setup.masters is masters for model in setup.models]
        params = {id(param) for model in models for param in model.parameters()}
        return [id(param) in params for param in stepped_params(optimizer) if param.dtype in HALF_DTYPES]

    def _meet(self, optimizer: Any) -> None:
        """Give an optimizer that was made after `initialize` masters, before anything is loaded into it."""
        with contextlib.suppress(AttributeError):
            # A half-built optimizer has no groups.
            if any(self._halves_among(optimizer, masters=True)):
                self.optimizers.keep_masters(optimizer)

    def patch(self, target: Target) -> None:
        """Patch one more target while active."""
        if self._installation is not None:
            self._installation.add(target)
            self._registered.append(target)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """Names that other modules had taken from torch before ``init()``, and that were rebound."""
        return self._installation.patches.late_bound if self._installation is not None else ()

    # -- diagnostics --

    def observe(self, observer: Observer) -> Watch:
        """Tell an observer of each call of a patched function, from now on; see `Handle.observe`."""
        self.check_active()
        if not isinstance(observer, Observer):
            raise UsageError(f"observe() takes an autoamp.diagnostics.Observer, not {kind_of(observer)}")
        if not self.settings.enabled:
            return Watch(observer.ended)
        first = not self.observation.observers
        self.observation.add(observer)
        if first:
            self.install_anew()
        return Watch(lambda: self.observe_no_more(observer))

    def observe_no_more(self, observer: Observer) -> None:
        """Tell this observer no more."""
        if self.observation.remove(observer) and not self.observation.observers:
            self.install_anew()

    def trace(self, *, profile: bool = False) -> CastTrace:
        """Trace casts within a ``with`` statement; see `Handle.trace`."""
        self.check_active()
        return CastTrace(self.casts, self.observation, self.observe, profile=profile)

    def on_model(self, told: Callable[[], object] | None) -> None:
        """Call this before each outermost call of a module, while anything observes; None ends that."""
        self.observation.on_model = told

    def on_step(self, told: Callable[[], object]) -> Callable[[], None]:
        """Call this after each step of a guarded optimizer, skips included; return what ends that."""
        self.followers.after_all.append(told)
        self.tell_followers()
        return lambda: self.followers.after_all.remove(told)

    def tell_followers(self) -> None:
        """Tell the followers of each step of a guarded optimizer from now on; of any optimizer where it is disabled."""
        if not self.settings.enabled and not self._step_hooks:
            hook = register_optimizer_step_post_hook(lambda *_: self.followers.stepped(lambda: False))
            self._step_hooks.append(hook)
        self.optimizers.on_stepped = lambda skips: self.followers.stepped(lambda: skips is not None and skips.last)

    @property
    def loss_scale(self) -> float:
        """The current scale of the first loss."""
        return self.optimizers.scalers[0].loss_scale

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; see `Handle.stats`."""
        kinds: dict[str, int] = {}
        for found in self.overflows.all:
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
        counts, own = self.optimizers.counts, self.optimizers.counts.own
        self.nonfinite.own_scaler.catch_up()
        # Catches up: scalers hear of steps no earlier than that.
        skipped = counts.all_skipped
        # Scalers of a handle that guards no optimizer say nothing.
        scalers = [
            *(self.optimizers.scalers if self.settings.enabled and (own is None or counts.steps) else []),
            *(() if own is None else own.losses),
        ]
        return {
            "loss_scale": counts.loss_scale(self.loss_scale),
            "loss_scales": [scaler.loss_scale for scaler in scalers],
            "found_inf": [scaler.overflows for scaler in scalers],
            "steps": counts.all,
            "skipped": skipped,
            "last_step_skipped": counts.last_skipped or self.nonfinite.last_skipped,
            "nonfinite": self.nonfinite.total,
            "casts": {} if self.counts is None else self.counts.as_dict()["casts"],
            "overflows": kinds,
        }

    # -- models, optimizers and scaling --

    def keep_masters(self, optimizer: Any) -> None:
        """Let an optimizer step fp32 masters of its half parameters. `initialize` calls this."""
        self.optimizers.keep_masters(optimizer, self.models.originals)

    def step_halves(self, optimizer: Any) -> None:
        """Let an optimizer step half parameters themselves. `initialize` calls this."""
        self.models.step_halves(optimizer)
        self.optimizers.guard(optimizer, check=False)

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Take note that the program itself computes in half precision, in these dtypes if they are known.

        With ``scope="modules"`` casts end for good.
        """
        if isinstance(self.casts, ModuleCasts):
            self.casts.yield_to(whom, dtypes)

    def _leave_scaling_to(self, whom: str) -> None:
        if self.auto_scaling is not None:
            self.auto_scaling.yield_to(whom)


def kind_of(value: Any) -> str:
    """Return how an error names what somebody gave."""
    return f"a {type(value).__name__}" if value is not None else "None"
