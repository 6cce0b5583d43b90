"""Why a run casts no op though it trains: what is seen at the first step of an optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from autoamp.core import CastState, Listener, Listeners, ScopedCasts, current_runtime, listen
from autoamp.errors import line_of_user
from autoamp.tensors import dtype_name
from autoamp.torch_private import compiled_graphs


class FirstStep(Listener):
    """Looks once at an optimizer that is about to step, and at what was called before; later steps do not call it."""

    def __init__(self) -> None:
        self._line: str | None = None
        # The dtypes and device types of the optimizer's parameters.
        self._kinds: set[tuple[torch.dtype, str]] = set()
        self._has_models = False
        self._listening = contextlib.ExitStack()

    def begin(self, listeners: Listeners) -> None:
        """Look at the first step under a handle, unless one was seen, or is looked for already.

        Args:
            listeners: Those of the handle.
        """
        if self._line is None:
            self.stop()
            self._listening.push(listen(optimizer_called=self._look))
            listeners.add(self)
            self._listening.callback(listeners.remove, self)

    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._line is not None or torch.compiler.is_compiling():
            return
        self._line = line_of_user()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._kinds = {(param.dtype, param.device.type) for param in params}
        now = current_runtime()
        self._has_models = now is not None and isinstance(now.casts, ScopedCasts) and now.casts.has_cast_models

    def step_ended(self, step: Any) -> None:
        """Look no more after the first step. torch forbids a hook of a step to remove itself."""
        if self._line is not None:
            self.stop()

    def stop(self) -> None:
        """Look no more."""
        self._listening.close()

    def why_no_op(self, casts: CastState) -> str | None:
        """Return why no op of a listed function was counted, as far as it is known, in a program that stepped."""
        if compiled_graphs():
            return "compiled code is not counted"
        if casts.disabled_at is not None:
            return f"torch.autocast(enabled=False) at {casts.disabled_at} turns casts off"
        if self._line is None:
            return None
        cast = (torch.float32, casts.device_type)
        if self._kinds and cast not in self._kinds:
            kinds = " and ".join(sorted(f"{dtype_name(dtype)} on {device}" for dtype, device in self._kinds))
            return f"the step at {self._line} is of parameters in {kinds}, and float32 on {casts.device_type} is cast"
        if casts.in_modules and not self._has_models:
            return f"no module with parameters was called before the step at {self._line}"
        return f"no listed op was called with casts on before the step at {self._line}"
