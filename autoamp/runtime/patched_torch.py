"""The patches of one runtime: built for its present state, put in place, taken back, built anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoamp.errors import warn_user
from autoamp.modules import ModuleCasts, build_module_call
from autoamp.ops import Target, expand
from autoamp.patching import imitate
from autoamp.rules import CastRule
from autoamp.runtime.installation import Installation
from autoamp.stepping import ClippingWatch, OptimizerSteps, scaled_params

__all__ = ["PatchedTorch"]

log = logging.getLogger(__name__)


class PatchedTorch:
    """Torch with the patches of a runtime in place, or without.

    Args:
        runtime: Whose casts, models, optimizers and diagnostics the patches serve.

    Attributes:
        installation: The patches; None where torch is not patched.
        skipped_rules: Rules of shipped list sets on ops that this torch lacks.
        step_hooks: Hooks on the steps of all optimizers, to be removed with the patches.
    """

    def __init__(self, runtime: Any) -> None:
        self.installation: Installation | None = None
        self.skipped_rules: tuple[CastRule, ...] = ()
        self.step_hooks: list[Any] = []
        self._runtime = runtime
        self._steps = OptimizerSteps(runtime.optimizers)
        self._registered: list[Target] = []
        self._classes_checked = False

    def patch(self, registered: Sequence[Target]) -> None:
        """Put the patches in place. Where one fails torch is left as it was."""
        run = self._runtime
        casts, settings = run.casts, run.settings
        expansion = expand(settings.table)
        installation = Installation(casts, settings, run.observation, self._builders())
        casts.open()
        try:
            installation.install(expansion, tuple(registered))
        except BaseException:
            casts.shut()
            raise
        self.installation, self._registered, self.skipped_rules = installation, list(registered), expansion.skipped
        self._steps.start(installation.patches)
        # After the hook that ends a rehearsed step.
        run.nonfinite.start()
        if settings.table.modules:
            self.step_hooks.append(register_optimizer_step_pre_hook(lambda *_: self._check_classes()))
        if isinstance(casts, ModuleCasts):
            note_step = casts.note_step
            self.step_hooks.append(register_optimizer_step_pre_hook(lambda *_: note_step()))
        if run.auto_scaling is not None:
            run.auto_scaling.resume()
        log.log(
            logging.INFO if settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            settings.dtype, settings.device_type, len(expansion.targets), len(self.late_bound), len(self.skipped_rules),
        )  # fmt: skip

    def _builders(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what the state of the runtime needs besides the rules: owners, attributes, replacements' builders."""
        run = self._runtime
        clipping = ClippingWatch(lambda: scaled_params(run.optimizers))
        return [
            (torch.nn.utils, "clip_grad_norm_", clipping.around),
            (torch.nn.utils, "clip_grad_value_", clipping.around),
            (torch.nn.Module, "__call__", self._module_call),
            *((torch.nn.Module, name, builder) for name, builder in run.models.builders()),
            *([(torch.optim.Optimizer, "__init__", self._optimizer_init)] if run.keeps_masters else []),
            *run.overflows.recorder.builders(),
            *run.nonfinite.own_scaler.builders(),
        ]

    def _module_call(self, original: Any) -> Any:
        run = self._runtime
        forward_dtypes, recorder = run.models.forward_dtypes, run.overflows.recorder
        call = build_module_call(original, run.casts, run.precisions, forward_dtypes, recorder)
        return run.observation.watched_modules(call) if run.observation.observers else call

    def _optimizer_init(self, original: Any) -> Any:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._runtime.optimizer_made(optimizer)

        return imitate(init, original)

    def restore(self) -> tuple[str, ...]:
        """Take the patches back and return the names that others patched on top."""
        installation, self.installation = self.installation, None
        if installation is None:
            # Another thread has restored it since.
            return ()
        run = self._runtime
        if run.auto_scaling is not None:
            run.auto_scaling.pause()
        run.casts.shut()
        self.remove_hooks()
        self._steps.stop()
        run.nonfinite.stop()
        return installation.remove()

    def patch_anew(self) -> None:
        """Take the patches back and put them in place again, as the state of the runtime asks for now."""
        if self.installation is not None:
            self.restore()
            self.patch(self._registered)

    def remove_hooks(self) -> None:
        """Remove the hooks on the steps of all optimizers."""
        while self.step_hooks:
            self.step_hooks.pop().remove()

    def add(self, target: Target) -> None:
        """Patch one more target, where torch is patched."""
        if self.installation is not None:
            self.installation.add(target)
            self._registered.append(target)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """Names that other modules had taken from torch before ``init()``, and that were rebound."""
        return self.installation.patches.late_bound if self.installation is not None else ()

    def _check_classes(self) -> None:
        """At the first step, warn of classes in lists that waited for their definition: what trains is defined now."""
        if not self._classes_checked:
            self._classes_checked = True
            for message in self._runtime.precisions.missing_classes():
                warn_user(f"a rule has no effect: {message}")

    def unmatched_rules(self) -> dict[str, str]:
        """Return what of the user's lists has had no effect so far, by name, each with a message for the user."""
        waiting = () if self.installation is None else self.installation.waiting
        ops = [rule for rule in waiting if not rule.origin.shipped]
        unmet = {rule.target: f"{rule.target!r} ({rule.origin}) names nothing that was imported" for rule in ops}
        return {**unmet, **self._runtime.precisions.unmatched()}
