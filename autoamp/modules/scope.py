"""``init(scope="modules")``: casts for programs written without mixed precision.

Ops inside a module call are cast, the outputs of the outermost call are fp32, and elsewhere an op is cast only if an
argument is in the half dtype. A program that computes in half precision itself is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module

from autoamp.casting import Casts
from autoamp.modules.half_interop import interop_builders
from autoamp.tensors import HALF_DTYPES, iter_tensors

__all__ = ["AUTOCAST", "ModuleCasts"]

AUTOCAST = "torch.autocast"
"""What `ModuleCasts.yielded_to` calls the program's own regions."""

log = logging.getLogger(__name__)


class ModuleCasts(Casts):
    """Casts within calls of modules, until the program's own mixed precision is seen."""

    in_modules = True

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True) -> None:
        super().__init__(dtype, device_type, enable_caching=enable_caching, on=None)
        self._trains = False

    def note_step(self) -> None:
        """Note that an optimizer has stepped: half models from now on may be copies to save or to evaluate."""
        self._trains = True

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Note that the program enters a region. One with gradients on means that the program casts by itself.

        A region for an evaluation does not say how the program trains.
        """
        if not enabled or device_type != self.device_type or torch.compiler.is_compiling():
            return
        self.own_dtypes[torch.get_autocast_dtype(device_type)] += 1
        if self.yielded_to is not None and self.yielded_to.endswith("GradScaler"):
            # What the scaler scales for.
            self.yielded_to = AUTOCAST
        if torch.is_grad_enabled():
            self.yield_to(AUTOCAST)

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Note that the program has its own mixed precision. From now on nothing is cast for it, and no loss scaled."""
        super().yield_to(whom, dtypes)
        if self._on is None:
            self._on = False
            if self.is_open:
                # Only the default: a thread that is within a module's call has its own switches until the call ends.
                self.local.set_default(False, forced_off=True)
            log.info("the program has %s: autoamp does not cast", whom)

    def begin_call(self, module: Module) -> bool:
        """Tell whether casts are to be on within the call of a module: an outermost one of a model in fp32.

        A half model before the first step means that the program does its own mixed precision.
        """
        if self.local.switches.on is not None:
            return False
        first = next(module.parameters(), None)
        if first is None or first.dtype not in HALF_DTYPES:
            return True
        if not self._trains and not torch.compiler.is_dynamo_compiling():
            self.yield_to(f"{type(module).__name__} in {str(first.dtype).removeprefix('torch.')}", [first.dtype])
        return False

    def wants(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call is to be cast: within a module's call, or because an argument is in the half dtype."""
        on = self.local.switches.on
        return any(tensor.dtype is self.dtype for tensor in iter_tensors((args, kwargs))) if on is None else on

    def when_off(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replacement calls outside of modules' calls: it casts if an argument is in the half dtype."""
        local, cast = self.local, self.local.bound(replacement, True)

        def outside(*args: Any, **kwargs: Any) -> Any:
            return (cast if local.switches.on is None and self.wants(args, kwargs) else original)(*args, **kwargs)

        return outside

    def builders(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what else is to be patched: where half tensors meet code that knows of none."""
        return interop_builders(self)
