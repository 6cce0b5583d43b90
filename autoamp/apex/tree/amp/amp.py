"""The tree's `apex.amp.amp`: the old API. ``_DECORATOR_HANDLE`` is the handle that is active when it is read."""

from __future__ import annotations

import sys
import types
from typing import Any

from autoamp.apex.amp.api import init
from autoamp.apex.amp.state import AmpHandle, amp_handle
from autoamp.runtime import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)


class _Module(types.ModuleType):
    @property
    def _DECORATOR_HANDLE(self) -> AmpHandle | None:
        return amp_handle()

    @_DECORATOR_HANDLE.setter
    def _DECORATOR_HANDLE(self, handle: AmpHandle | None) -> None:
        """Code that sets this to None wants no amp any more; any other handle is active by itself."""
        active = amp_handle()
        if handle is None and active is not None:
            active._deactivate()


_this: Any = sys.modules[__name__]
_this.__class__ = _Module
