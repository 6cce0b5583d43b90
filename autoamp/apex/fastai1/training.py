"""A `Learner` of fastai v1 trains unchanged under ``autoamp.init()``.

While a handle is active, the first ``learn.fit`` starts `autoamp.Handle.auto_scale`, a skipped step decays no weights,
and ``learn.to_fp16()`` chooses the loss scale. fastai may be imported before or after; where it is not, this costs
nothing.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp.apex.fastai1.shims import ModulePatches, replace
from autoamp.apex.fp16_utils import FP16_Optimizer
from autoamp.core import (
    DynamicLossScaler,
    LossScaler,
    PatchSet,
    StaticLossScaler,
    activated,
    current_handle,
    current_runtime,
    original_of,
    runtime_of,
    suspended,
)
from autoamp.errors import UsageError

log = logging.getLogger(__name__)


def watch() -> None:
    """Let fastai's training loop follow the active handle, once fastai is imported. ``import autoamp`` calls this."""
    _training.wait()
    if "fastai.basic_train" in sys.modules:
        _follow_handles()
    else:
        _imports.when_imported("fastai.basic_train", lambda _: _follow_handles())


def _follow_handles() -> None:
    if _enable not in activated:
        activated.append(_enable)
        suspended.append(_training.disable)
    if current_handle() is not None:
        _training.enable()


def _enable(_: Any) -> None:
    _training.enable()


def _follow_training(patches: PatchSet, module: Any) -> None:
    _replace_everywhere(patches, module, "fit", functools.partial(_around_fit, module.OptimWrapper))
    replace(patches, module.OptimWrapper, "step", _around_step)


def _follow_to_fp16(patches: PatchSet, module: Any) -> None:
    _replace_everywhere(patches, module, "to_fp16", functools.partial(_around_to_fp16, module))
    patches.replace(module.Learner, "to_fp16", module.to_fp16)


def _replace_everywhere(patches: PatchSet, module: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Patch a function of a module, also where others have taken it, as by `from fastai.train import *`."""
    replace(patches, module, name, around)
    new = vars(module)[name]
    taken = original_of(new)
    patches.rebind({id(taken): (taken, new)}, lambda other: other == module.__name__)


# In place while a handle is active.
_training = ModulePatches({"fastai.basic_train": _follow_training, "fastai.train": _follow_to_fp16})
# Never restored, as in `ModulePatches`.
_imports = PatchSet()


def _around_fit(wrapper: Any, original: Any) -> Any:
    """Return what scales the backward passes of the program from its first training on."""

    def fit(epochs: int, learn: Any, callbacks: Any = None, metrics: Any = None) -> None:
        runtime = current_runtime()
        # An OptimWrapper answers every name, so what it wraps is asked for by its type.
        if runtime is not None and _is_guardable(learn.opt.opt if isinstance(learn.opt, wrapper) else learn.opt):
            _refuse_own_scaling(callbacks)
            if runtime.optimizers.has_masters and runtime.optimizers.loss_scalers.choose(0).checks:
                raise UsageError(
                    "fit() of fastai scales no losses of a model with master weights, whose gradients in fp16 would "
                    "become 0; train it at opt_level='O1', as after autoamp.init(), or in bf16"
                )
            if not (runtime.optimizers.has_masters or runtime.auto_scaling.active):
                runtime.auto_scaling.start()
        original(epochs, learn, callbacks, metrics)

    return fit


def _around_step(original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _will_skip(self.opt):
            # fastai's step would decay the weights first. The optimizer's own does the skip: its guard counts it.
            self.opt.step()
            return None
        return original(self, *args, **kwargs)

    return step


def _around_to_fp16(module: Any, original: Any) -> Any:
    """Return what leaves the model in fp32, which autoamp casts, and takes the loss scale that is asked for."""

    def to_fp16(learn: Any, *args: Any, **kwargs: Any) -> Any:
        handle = current_handle()
        if handle is None:
            return original(learn, *args, **kwargs)
        asked = inspect.signature(original).bind(learn, *args, **kwargs)
        asked.apply_defaults()
        learn.to_fp32()
        _clip(learn, asked.arguments["clip"], module.GradientClipping)
        runtime = runtime_of(handle)
        if handle.settings.dtype is torch.float16 and not runtime.setups:
            scaler = _scaler_of(**asked.arguments)
            runtime.optimizers.loss_scalers.use([scaler], ())
            runtime.optimizers.loss_scalers.forget_but([scaler])
            if runtime.auto_scaling.active:
                # It takes up this scaler.
                runtime.auto_scaling.start()
        log.warning(
            "learn.to_fp16() leaves the model in fp32: autoamp casts to %s, with a loss scale of %g",
            handle.settings.dtype, handle.loss_scale,
        )  # fmt: skip
        return learn

    return to_fp16


def _scaler_of(loss_scale: float | None, max_noskip: int, dynamic: bool, max_scale: float, **_: Any) -> LossScaler:
    """Return the scaler that stands for fastai's, which begins with these scales where none is given."""
    if not dynamic:
        return StaticLossScaler(512.0 if loss_scale is None else loss_scale)
    first = 2.0**16 if loss_scale is None else loss_scale
    return DynamicLossScaler(first, growth_interval=max_noskip, max_loss_scale=max(max_scale, first))


def _clip(learn: Any, clip: float | None, kind: Any) -> None:
    """Let a learner clip its gradients by fastai's own callback, in place of that of an earlier call."""
    before = vars(learn).pop("mp_cb", None)
    learn.callbacks = [one for one in learn.callbacks if one is not before]
    if clip is not None:
        learn.mp_cb = kind(learn, clip)
        learn.callbacks.append(learn.mp_cb)


def _will_skip(optimizer: Any) -> bool:
    """Whether the guard will skip the optimizer's next step. Waits for the device where it scales."""
    runtime = current_runtime()
    if runtime is None or not _is_guardable(optimizer):
        return False
    guard = runtime.optimizers.guard(optimizer, check=False)
    guard.grads.finish_delayed()
    return bool(guard.grads.checks) and guard.grads.overflowed()


def _is_guardable(optimizer: Any) -> bool:
    """Whether a handle scales for it: fastai's FakeOptimizer steps nothing, an FP16_Optimizer scales by itself."""
    return isinstance(optimizer, Optimizer) and not isinstance(optimizer, FP16_Optimizer)


def _refuse_own_scaling(callbacks: Any) -> None:
    """Raise a UsageError where fastai's own mixed precision is among the callbacks."""
    module: Any = sys.modules.get("fastai.callbacks.fp16")
    own = getattr(module, "MixedPrecision", ())
    if any(isinstance(callback, own) for callback in callbacks or ()):
        raise UsageError(
            "fastai's MixedPrecision scales the loss itself and makes the model half; call autoamp.init() before "
            "learn.to_fp16(), which leaves both to autoamp then, or deactivate() the handle"
        )
