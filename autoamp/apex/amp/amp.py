"""The old API of `apex.amp`. ``_DECORATOR_HANDLE`` is the handle that is active when it is read."""

from __future__ import annotations

import sys
import types
from typing import Any

from autoamp import core
from autoamp.apex.alias import options
from autoamp.apex.amp.frontend import of_alias
from autoamp.apex.amp.handle import AmpHandle, NoOpHandle, amp_handle
from autoamp.apex.amp.properties import as_flag, as_scale
from autoamp.core import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)


def init(
    enabled: Any = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Patch torch and return the handle of the old API, as ``apex.amp.init`` did; see `autoamp.init`.

    The half dtype, the device type and the lists are those that `install_as_apex` was given. ``enabled`` and
    ``loss_scale`` may be strings.
    """
    on = as_flag("enabled", enabled)
    handle = core.init(bool(on), as_scale(loss_scale), enable_caching, verbose, allow_banned, **of_alias(options()))
    return AmpHandle(handle, verbose) if on else NoOpHandle()


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
