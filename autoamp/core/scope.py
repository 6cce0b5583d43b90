"""``init(scope="modules")``: casts for programs written without mixed precision.

Listed ops inside a module's call are cast, and the outputs of the outermost module are converted to fp32. The outermost
module is the first one that has parameters. Outside of modules an op is cast only if one of its arguments is in half
precision already. Nothing is cast for a program that casts by itself: with `torch.autocast`, a half model or an
`FP16_Optimizer`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from autoamp.core.casts import CastState
from autoamp.core.threads import ThreadMode, ThreadState, TracedMode
from autoamp.tensors import HALF_DTYPES, dtype_name, iter_tensors
from autoamp.torch_private import is_replica

AUTOCAST = "torch.autocast"
"""What `ModuleCasts.yielded_to` calls the program's own regions."""

log = logging.getLogger(__name__)


class ModuleCasts(CastState):
    """Casts within calls of modules, until the program is seen to cast by itself."""

    in_modules = True

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True) -> None:
        super().__init__(dtype, device_type, enable_caching=enable_caching, on=None)
        # The models that are cast, each with what its first parameter was when all of them were looked through.
        self._cast_models: weakref.WeakKeyDictionary[Module, tuple[torch.dtype, bool]] = weakref.WeakKeyDictionary()
        self._trains = False

    @property
    def has_cast_models(self) -> bool:
        """Whether a model that still exists was cast."""
        return bool(self._cast_models)

    def note_step(self) -> None:
        """Note that an optimizer has stepped. Where a model was cast before, half models may now be copies of it."""
        self._trains = self._trains or self.has_cast_models

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Note that the program enters a region. One with gradients on means that the program casts by itself.

        A region for an evaluation does not say how the program trains.
        """
        if not enabled or device_type != self.device_type or torch.compiler.is_compiling():
            return
        self.own_dtypes[torch.get_autocast_dtype(device_type)] += 1
        if torch.is_grad_enabled():
            self.yield_to(AUTOCAST)

    def obeys_disabled(self, mode: ThreadMode | TracedMode) -> bool:
        """Whether a disabled region that begins now is an exception; else it is the program's AMP switch, which is off.

        A switch is outside of every module's call, in a program that opens no enabled region.
        """
        return mode.on is not None or self.local.bare_calls > 0 or bool(self.own_dtypes)

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Note that the program casts by itself. From now on nothing is cast for it, and no loss scaled."""
        self.own_dtypes.update(dtypes)
        if self.yielded_to is None:
            self.yielded_to, self._on = whom, False
            if self.is_open:
                # Only the default: a thread that is within a module's call has its own switches until the call ends.
                self.local.set_default(False, forced_off=True)
            log.info("the program has %s: autoamp does not cast, and does not scale its losses", whom)

    def begin_call(self, module: Module) -> bool | None:
        """Whether casts are to be on within the call of a module: an outermost call of a model that is not half.

        A half model means that the program casts by itself. One that is called without gradients, after a model that
        is cast was trained, may be a copy to evaluate: then its own call alone is left alone.

        None of a module without any parameters, such as a metric or an augmentation, which a program of torch.amp calls
        outside of its region: modules that it calls are asked as outside of it.
        """
        if self.local.now().on is not None:
            return False
        first = next(module.parameters(), None)
        if first is None and not is_replica(module):
            return None
        half = None if first is None else self._half_dtype(module, first)
        if half is None:
            return True
        if not torch.compiler.is_dynamo_compiling() and (torch.is_grad_enabled() or not self._trains):
            self.yield_to(f"{type(module).__name__} in {dtype_name(half)}", [half])
        return False

    def _half_dtype(self, module: Module, first: Parameter) -> torch.dtype | None:
        """Return the half dtype of a half model, which trains some parameters in half precision; else None.

        Where all parameters are frozen, each counts. All are looked through at a model's first call, and again once its
        first parameter has changed: a large model has hundreds.
        """
        known = first.dtype, first.requires_grad
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and self._cast_models.get(module) == known:
            return None
        params = list(module.parameters())
        counted = [param for param in params if param.requires_grad] or params
        half = next((param.dtype for param in counted if param.dtype in HALF_DTYPES), None)
        if half is None and not compiling:
            self._cast_models[module] = known
        return half

    def wants(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call is to be cast: within a module's call, or because an argument is in the half dtype."""
        on = self.local.now().on
        return self._has_half(args, kwargs) if on is None else on is True

    def _has_half(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return any(tensor.dtype is self.dtype for tensor in iter_tensors((args, kwargs)))

    def when_off(
        self, original: Callable[..., Any], replacement: Callable[..., Any], local: ThreadState | TracedMode
    ) -> Callable[..., Any]:
        """Return what a replacement calls outside of modules' calls: it casts if an argument is in the half dtype."""
        has_half, cast = self._has_half, self.local.with_mode(replacement, True)

        def outside(*args: Any, **kwargs: Any) -> Any:
            return (cast if local.mode.on is None and has_half(args, kwargs) else original)(*args, **kwargs)

        return outside
