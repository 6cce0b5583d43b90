"""The program's own torch.autocast regions. `enabled=False`: who asks torch for no casts gets none of ours either.

In an enabled region torch casts, and `CastState.eligible` steps aside; the casts are told of it, since a program that
has such regions may mean the rest to be fp32. One in our half dtype within a call that we cast changes nothing: our
casts go on. A disabled one leaves no trace to ask for, so it is seen on the way in and out. Within a call it may be of
any device type: it protects what it stands around, wherever that runs. Only those count that the program enters: torch
itself enters regions to restore what it found earlier, in worker threads, in backward and while Dynamo traces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from autoamp.core.autocast_state import PROTECTED, caller_of, is_torchs
from autoamp.core.casts import CastState
from autoamp.core.threads import ThreadState
from autoamp.errors import line_of_user
from autoamp.torch_private import traced_frames

# Where torch enters a region in the program's name: as a decorator, through the classes by device, and for a custom
# function whose inputs it casts.
_IN_THE_PROGRAMS_NAME = frozenset({"decorate_autocast", "__enter__", "decorate_fwd"})
# Whose functions stand around what runs in a module's call, and around what is run again later as in that call.
_AROUND_CALLS = frozenset({"autoamp.core.module_calls", ThreadState.__module__})


class AutocastRegions:
    """Turns one handle's casts off within disabled autocast regions, in their thread.

    Regions of all kinds are told to `CastState.note_autocast`, but for those that our casts take the place of.

    Args:
        casts: The casts of the handle.
        goes_on: Whether our casts go on in an enabled region of their dtype, within a call that they cast.
    """

    def __init__(self, casts: CastState, *, goes_on: bool) -> None:
        self._casts = casts
        self._goes_on = goes_on

    def autocast_entered(self, region: torch.autocast) -> None:
        """Turn casts off in a disabled region of the program."""
        casts, local, traced = self._casts, self._casts.local, traced_frames()
        is_ours = region.device == casts.device_type
        # Dynamo enters the regions of the code that it traces.
        if not _is_the_programs(region, traced[0] if traced else next(_frames())):
            return
        on = local.traced.on if traced else local.mode.on
        goes_on = self._goes_on and region._enabled and is_ours and region.fast_dtype is casts.dtype
        if goes_on and not traced and not region.prev and self._in_cast_call(on, traced):
            torch.set_autocast_enabled(region.device, False)
            return
        if not traced:
            casts.note_autocast(region.device, enabled=region._enabled)
        if region._enabled or not (is_ours or self._in_cast_call(on, traced)):
            return
        if not casts.obeys_disabled(local.traced if traced else local.mode):
            return
        if traced:
            local.regions = (*local.regions, (region, None))
            local.traced.autoamp_set(False, True)
        else:
            if region.fast_dtype is PROTECTED:
                # Regions within take the dtype from torch, which knows none that is fp32.
                torch.set_autocast_dtype(region.device, region.prev_fastdtype)
            local.regions = (*local.regions, (region, local.set(False, forced_off=True)))
            casts.disabled_at = casts.disabled_at or line_of_user()

    def _in_cast_call(self, on: Any, traced: list[Any]) -> bool:
        """Whether a region is entered within a module's call that is cast, or in the backward of a custom function."""
        if on is not True:
            return False
        frames = (*traced, *_frames())
        return self._casts.in_modules or any(caller_of(frame)[0] in _AROUND_CALLS for frame in frames)

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


def _frames() -> Iterator[Any]:
    """Yield the frames from that which enters a region on outwards, without those of ours on the way to it."""
    frame: Any = sys._getframe(1)
    is_outside = False
    while frame is not None:
        is_outside = is_outside or not caller_of(frame)[0].startswith("autoamp.")
        if is_outside:
            yield frame
        frame = frame.f_back


def _is_the_programs(region: torch.autocast, frame: Any) -> bool:
    """Whether a function of the program, or one of torch that acts for it, enters a region."""
    module, function = caller_of(frame)
    if not is_torchs(module) or function in _IN_THE_PROGRAMS_NAME:
        return True
    return function == "decorate_bwd" and not region._enabled and region.fast_dtype is PROTECTED
