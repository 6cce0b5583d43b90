"""What torch's functions for the autocast state say and do where our casts are on.

Attention modules, custom functions and key-value caches choose a dtype by `torch.is_autocast_enabled`. They hear of our
casts. Torch itself does not, for it stores the answers to put its own state back later; the exceptions are two:
`torch.amp.custom_fwd`, which casts inputs by the answer, and a region without a dtype, which takes the one in use. What
sets the state to what it was told sets our casts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from autoamp.core.casts import CastState
from autoamp.core.patches import original_of
from autoamp.torch_private import (
    disable_in_dynamo,
    mark_constant,
    name_in_frame,
    start_no_graph,
    trace_as,
    traced_frames,
)

PROTECTED = torch.float32
"""What `custom_fwd` notes as the dtype of a function that casts its inputs, and gives to the region of its backward.

No enabled region has it, so by it a backward is known that is to run without casts, as its forward did."""

_AMP = "torch.amp.autocast_mode"
_BY_SETTER: Any = "by a setter"
"""`ThreadMode.forced_off` where the program turned casts off by `torch.set_autocast_enabled`, and may turn them on."""

_DEVICES = {"": None, "cpu_": "cpu", "gpu_": "cuda", "ipu_": "ipu", "xla_": "xla"}
"""What stands in the names of torch's functions, and the device type that it means."""


def autocast_functions(casts: CastState) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the owner and the name of each function, and what builds its replacement."""
    for part, device in _DEVICES.items():
        for name, build in (
            (f"is_autocast_{part}enabled", partial(_build_getter, answer=True)),
            (f"get_autocast_{part}dtype", partial(_build_getter, answer=casts.dtype)),
            (f"set_autocast_{part}enabled", _build_switch),
            (f"set_autocast_{part}dtype", _build_dtype_setter),
        ):
            if hasattr(torch, name):
                yield torch, name, partial(build, casts=casts, device=device)


def is_torchs(module: str) -> bool:
    """Whether a module is torch's or ours, by its name."""
    return f"{module}.".startswith(("torch.", "autoamp."))


def caller_of(frame: Any) -> tuple[str, str]:
    """Return the names of a frame's module and function."""
    return frame.f_globals.get("__name__") or "", frame.f_code.co_name


def _are_on(casts: CastState) -> bool:
    return casts.local.now().on is True and not casts.autocast_rules()


def _build_getter(original: Any, casts: CastState, device: str | None, answer: Any) -> Any:
    """Build what answers with ``answer`` where casts are on."""
    plain = original_of(torch.is_autocast_enabled if answer is True else torch.get_autocast_dtype)

    def is_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # Without a device type torch means CUDA.
        return (device or (args[0] if args else kwargs.get("device_type", "cuda"))) == casts.device_type

    def heard_by(frame: Any, own: Any, is_on: bool) -> Any:
        module, function = caller_of(frame)
        casts_inputs = (module, function) == (_AMP, "decorate_fwd") and name_in_frame(frame, "cast_inputs") is not None
        if casts_inputs and answer is not True:
            return PROTECTED
        # A region without a dtype asks as it is made.
        is_region = (module, function) == (_AMP, "__init__")
        return answer if is_on and (casts_inputs or is_region or not is_torchs(module)) else own

    @mark_constant
    def autoamp_heard(own: Any, is_on: bool) -> Any:
        # The first is the function below. Dynamo calls it by one of its own.
        frames = (one for one in traced_frames()[1:] if not caller_of(one)[0].startswith("torch._dynamo."))
        return heard_by(next(frames), own, is_on)

    def traced(*args: Any, **kwargs: Any) -> Any:
        # Dynamo knows some of the older spellings as functions that give no constant.
        asked = is_asked(args, kwargs)
        return autoamp_heard(plain(casts.device_type), _are_on(casts)) if asked else original(*args, **kwargs)

    @trace_as(traced)
    def getter(*args: Any, **kwargs: Any) -> Any:
        own = original(*args, **kwargs)
        return heard_by(sys._getframe(1), own, _are_on(casts)) if is_asked(args, kwargs) else own

    start_no_graph(getter)
    return getter


def _value_set(args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None, casts: CastState) -> Any:
    """Return what the program sets for the casts' device type; None where torch, or another device, is concerned.

    To be called by a replacement.
    """
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    asked = device or values.pop("device_type", None) or (values.pop(0) if len(values) > 1 else "cuda")
    is_ours = asked == casts.device_type and not is_torchs(caller_of(sys._getframe(2))[0])
    return values.popitem()[1] if is_ours and values else None


def _build_switch(original: Any, casts: CastState, device: str | None) -> Any:
    """Build what turns our casts off, and on again."""
    local = casts.local

    def switch(*args: Any, **kwargs: Any) -> Any:
        value = _value_set(args, kwargs, device, casts)
        if value is None or casts.autocast_rules():
            return original(*args, **kwargs)
        if _are_on(casts):
            if not value:
                local.set(False, forced_off=_BY_SETTER)
        elif value and local.mode.forced_off is _BY_SETTER:
            local.set(True, forced_off=False)
        else:
            original(*args, **kwargs)
        return None

    return disable_in_dynamo(switch)


def _build_dtype_setter(original: Any, casts: CastState, device: str | None) -> Any:
    """Build what does not let torch keep our dtype, which the program was told: its own regions may have another."""

    def set_dtype(*args: Any, **kwargs: Any) -> Any:
        is_told = _value_set(args, kwargs, device, casts) is casts.dtype
        is_ours = is_told and (_are_on(casts) or casts.local.mode.forced_off is _BY_SETTER)
        return None if is_ours else original(*args, **kwargs)

    return disable_in_dynamo(set_dtype)
