"""Casts for programs that know nothing of mixed precision: within the calls of modules, and of what derives from them.

A table that a constructor computes, a covariance, a metric, a step taken by hand are none of a model's forward pass,
and stay as precise as the program has them. So casts are on within a module's call, unless a module is constructed
meanwhile, and elsewhere for a call with an argument that requires gradients or is in the half dtype already. What comes
out of the outermost call is fp32 again.

A program that turns out to compute in half precision itself is left alone.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts, Switches
from autoamp.patching import imitate
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors
from autoamp.torch_private import is_any_autocast_enabled

__all__ = ["ModuleCasts"]

log = logging.getLogger(__name__)

# What may change the dtype of a module's parameters.
_CONVERSIONS = ("bfloat16", "double", "float", "half", "to", "type")
# In ``ThreadState.on``, where the constructor of a module has begun within the call of another.
_PAUSED: Any = ()


class ModuleCasts(Casts):
    """Casts within the calls of modules, and of what derives from them.

    Attributes:
        left_to: What the program itself computes in half precision with, so that nothing is cast; None where it has
            nothing of the kind.
        waits_for: The call that is to come first, as the program has it in its source; None where nothing is waited
            for.
        on_left: Called once with ``left_to``.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True) -> None:
        super().__init__(dtype, device_type, enable_caching=enable_caching, on=None)
        self.left_to: str | None = None
        self.waits_for: str | None = None
        self.on_left: Callable[[str], None] = lambda whom: None
        self._awaited: Callable[[], str | None] | None = None
        self._trains = False
        # By id the modules without half parameters, as far as anybody has looked. Dynamo cannot trace a WeakSet.
        self._seen: dict[int, weakref.ref[Module]] = {}

    # -- whether the program is cast --

    def wait_for(self, awaited: Callable[[], str | None]) -> None:
        """Ask before anything is cast whether the program is to set mixed precision up itself, and wait for that.

        The first step of an optimizer tells that it does not.

        Args:
            awaited: Names the call that the program sets it up by; None where it has none.
        """
        self._awaited = awaited

    def note_step(self) -> None:
        """Take note that an optimizer steps: who has not set mixed precision up by now will not do so."""
        self._trains, self._awaited = True, None
        if self.waits_for is not None and self.left_to is None:
            log.info("the program trains without %s: casts are on from here", self.waits_for)
            self.waits_for = None
            self._turn(None)

    def leave_to(self, whom: str) -> None:
        """Cast nothing any more: the program itself computes in half precision."""
        if self.left_to is None:
            self.left_to, self.waits_for = whom, None
            self._turn(False)
            log.info("the program has %s: casts are left to it", whom)
            self.on_left(whom)

    def _turn(self, on: bool | None) -> None:
        self._on = on
        if self.is_open:
            # No more than the default of threads: one that is within a module's call goes on to its end.
            self.local.set_default(on, forced_off=on is False)

    def _has_begun(self) -> bool:
        if self._awaited is not None and not torch.compiler.is_dynamo_compiling():
            awaited, self._awaited = self._awaited, None
            self.waits_for = awaited()
            if self.waits_for is not None:
                log.info("the program calls %s: nothing is cast before", self.waits_for)
                self._turn(False)
        return self.waits_for is None

    def _takes(self, module: Module) -> bool:
        """Tell whether a module's call is to be cast: not that of one in half precision, which is the program's own."""
        known = self._seen.get(id(module))
        if known is not None and known() is module:
            return True
        dtype = next((parameter.dtype for parameter in module.parameters() if parameter.dtype in HALF_DTYPES), None)
        if dtype is None:
            key, seen = id(module), self._seen
            seen[key] = weakref.ref(module, lambda _: seen.pop(key, None))
        elif not self._trains:
            self.leave_to(f"{type(module).__name__} in {str(dtype).removeprefix('torch.')}")
        # Later than that it is a copy, to be saved or evaluated.
        return dtype is None

    # -- where it is cast --

    def state(self) -> bool | None:
        """Tell whether this thread casts now; None where the arguments of each call tell."""
        local = self.local
        on: bool | None = local.on
        paused = on is _PAUSED
        if torch.compiler.is_dynamo_compiling() or not (paused or (on is None and local.constructing)):
            return True if paused else on
        # Nothing tells of the end of a constructor. Who is about to cast looks for it on the stack.
        if _in_constructor(sys._getframe(1)):
            return False
        local.constructing = False
        if paused:
            local.on = on = True
        return on

    def switches(self, args: Sequence[Any] = ()) -> Switches:
        """Return how this thread casts now; what requires gradients in ``args`` turns casts on."""
        on, forced_off = super().switches()
        if on is None and any(tensor.requires_grad for tensor in iter_tensors(args)):
            on = True
        return on, forced_off

    def remembered(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Callable[..., Any]:
        """Wrap a function as `Casts.remembered`. Where its arguments turn casts on, it gives fp32, as a module does."""
        run, on = super().remembered(function, args), self.state()
        if on is not None or not self.switches(args)[0]:
            return run
        return lambda *args, **kwargs: self._widened(run(*args, **kwargs))

    def wants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call is to be cast: outside modules, one whose arguments derive from a model's."""
        on = self.state()
        return on if on is not None else _derives((args, kwargs), self.dtype) and self._has_begun()

    def passing(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replacement calls where `ThreadState.on` is false: it looks closer."""
        local = self.local

        def passed(*args: Any, **kwargs: Any) -> Any:
            if not self.wants(args, kwargs):
                return original(*args, **kwargs)
            token = local.set(True)
            try:
                return replacement(*args, **kwargs)
            finally:
                local.reset(token)

        return passed

    def around_outermost(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands around a module's call that is within no other: it turns casts on."""
        local, compiling = self.local, torch.compiler.is_dynamo_compiling

        def outermost(module: Module, *args: Any, **kwargs: Any) -> Any:
            if self.state() is not None or not self._has_begun():
                return call(module, *args, **kwargs)
            within = compiling() or self._takes(module)
            token = local.set(within)
            try:
                outputs = call(module, *args, **kwargs)
            finally:
                local.reset(token)
            # In an autocast region of the program's own outputs are what torch makes of them.
            in_region = is_any_autocast_enabled() and self.autocast_rules()
            return self._widened(outputs) if within and not in_region else outputs

        return outermost

    def _widened(self, outputs: Any) -> Any:
        half, device_type = self.dtype, self.device_type

        def widen(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype is half and tensor.device.type == device_type else tensor

        return map_tensors(outputs, widen)

    def evaluating(self) -> Any:
        """Let a closure, which an optimizer calls within its step, cast as around the step."""
        return self.switched(None)

    # -- what is patched for it --

    def builders(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what else is to be patched: a module's constructor, and what changes its parameters' dtype."""
        return [
            (Module, "__init__", self._build_init),
            *((Module, name, self._build_conversion) for name in _CONVERSIONS),
        ]

    def _build_init(self, original: Any) -> Any:
        local, compiling = self.local, torch.compiler.is_dynamo_compiling

        def init(module: Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if not compiling() and not _is_torchs(type(module)):
                if local.on is True:
                    local.on = _PAUSED
                elif local.on is None:
                    local.constructing = True

        return imitate(init, original)

    def _build_conversion(self, original: Any) -> Any:
        seen, compiling = self._seen, torch.compiler.is_dynamo_compiling

        def convert(module: Module, *args: Any, **kwargs: Any) -> Any:
            if not compiling():
                seen.clear()
            return original(module, *args, **kwargs)

        return imitate(convert, original)


def _is_torchs(cls: type) -> bool:
    """Tell whether a class is torch's own: its layers compute no tables, and Dynamo makes modules while it traces."""
    return str(cls.__module__).partition(".")[0] == "torch"


def _in_constructor(frame: types.FrameType | None) -> bool:
    """Tell whether the constructor of a module is on the stack."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            built = frame.f_locals.get(code.co_varnames[0])
            if issubclass(type(built), Module):
                return True
        frame = frame.f_back
    return False


def _derives(values: Any, half: torch.dtype) -> bool:
    """Tell whether a tensor among nested arguments requires gradients, where they are recorded, or is a half one."""
    records = torch.is_grad_enabled()
    return any(tensor.dtype is half or (records and tensor.requires_grad) for tensor in iter_tensors(values))
