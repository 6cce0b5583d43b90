"""`torch.autocast(enabled=False)`: a program that asks torch for no casts gets none of ours either.

An enabled region needs nothing: there torch casts, and `Casts.eligible` steps aside. A disabled one leaves no trace to
ask for, so it is seen on the way in and out. Only those count that the program enters: torch itself enters regions to
restore what it found earlier, in worker threads, in backward and while Dynamo traces.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from autoamp.casting import Casts
from autoamp.patching import imitate

__all__ = ["DisabledRegions"]

# Where torch enters a region in the program's name: as a decorator, and through the classes by device.
_IN_THE_PROGRAMS_NAME = frozenset({"decorate_autocast", "__enter__"})
# What the names of our own modules begin with.
_OURS = __name__.partition(".")[0] + "."


class DisabledRegions:
    """Turns one handle's casts off within the disabled autocast regions of its device type, in their thread."""

    def __init__(self, casts: Casts) -> None:
        self._casts = casts

    def build_enter(self, original: Any) -> Any:
        """Build the replacement of ``torch.autocast.__enter__``."""
        local, device_type = self._casts.local, self._casts.device_type

        def enter(self: torch.autocast) -> Any:
            entered = original(self)
            if not self._enabled and self.device == device_type and _is_the_programs(sys._getframe(1)):
                local.regions = (*local.regions, (self, local.set(False, forced_off=True)))
            return entered

        return imitate(enter, original)

    def build_exit(self, original: Any) -> Any:
        """Build the replacement of ``torch.autocast.__exit__``."""
        local = self._casts.local

        def leave(self: torch.autocast, *exc_info: Any) -> Any:
            if local.regions and local.regions[-1][0] is self:
                *rest, (_, token) = local.regions
                local.regions = tuple(rest)
                local.reset(token)
            return original(self, *exc_info)

        return imitate(leave, original)


def _is_the_programs(frame: types.FrameType | None) -> bool:
    """Tell whether the program enters a region. What stands between it and torch are replacements of ours."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return True
    module = frame.f_globals.get("__name__") or ""
    return not (module == "torch" or module.startswith("torch.")) or frame.f_code.co_name in _IN_THE_PROGRAMS_NAME
