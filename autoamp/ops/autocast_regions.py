"""The program's own torch.autocast regions. `enabled=False`: who asks torch for no casts gets none of ours either.

In an enabled region torch casts, and `CastState.eligible` steps aside; the casts are told of it, since a program that
has such regions may mean the rest to be fp32. A disabled one leaves no trace to ask for, so it is seen on the way in
and out. Only those count that the program enters: torch itself enters regions to
restore what it found earlier, in worker threads, in backward and while Dynamo traces.
"""

from __future__ import annotations

import sys
import types

import torch

from autoamp.casting import CastState
from autoamp.errors import line_of_user
from autoamp.program import Subscriber
from autoamp.torch_private import traced_frame

# Where torch enters a region in the program's name: as a decorator, and through the classes by device.
_IN_THE_PROGRAMS_NAME = frozenset({"decorate_autocast", "__enter__"})
# What the names of our own modules begin with.
_OURS = __name__.partition(".")[0] + "."


class AutocastRegions(Subscriber):
    """Turns one handle's casts off within the disabled autocast regions of its device type, in their thread.

    Regions of all kinds are told to `CastState.note_autocast`.
    """

    def __init__(self, casts: CastState) -> None:
        self._casts = casts

    def autocast_entered(self, region: torch.autocast) -> None:
        """Turn casts off in a disabled region of the program."""
        casts, local = self._casts, self._casts.local
        is_off, traced = not region._enabled and region.device == casts.device_type, traced_frame()
        is_off = is_off and casts.obeys_disabled(local.mode if traced is None else local.traced)
        if traced is not None:
            # Dynamo enters the regions of the code that it traces.
            if is_off and _is_the_programs(*traced):
                local.regions = (*local.regions, (region, None))
                local.traced.autoamp_set(False, True)
        elif _is_the_programs(*_caller(sys._getframe(1))):
            casts.note_autocast(region.device, enabled=region._enabled)
            if is_off:
                local.regions = (*local.regions, (region, local.set(False, forced_off=True)))
                casts.disabled_at = casts.disabled_at or line_of_user()

    def autocast_left(self, region: torch.autocast, error: BaseException | None) -> None:
        """Turn casts on again."""
        local = self._casts.local
        if local.regions and local.regions[-1][0] is region:
            if isinstance(error, Exception):
                self._casts.explain(error)
            *rest, (_, token) = local.regions
            local.regions = tuple(rest)
            if token is None:
                local.traced.autoamp_reset()
            else:
                local.reset(token)


def _caller(frame: types.FrameType | None) -> tuple[str, str]:
    """Return the module and the name of the function that enters a region, below replacements of ours."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return ("", "") if frame is None else (frame.f_globals.get("__name__") or "", frame.f_code.co_name)


def _is_the_programs(module: str, function: str) -> bool:
    """Whether a function of the program, or one of torch that acts for it, enters a region."""
    return not (module == "torch" or module.startswith("torch.")) or function in _IN_THE_PROGRAMS_NAME
