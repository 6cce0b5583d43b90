"""Casts for programs written without mixed precision: within calls of modules, and of what is computed from outputs.

Casts are on within a module's call, but not in the constructor of a module that is made there. Outside of module calls
they are on for a function call with an argument that requires gradients or is in the half dtype already. What else a
program computes (a table in a constructor, a covariance, a metric, an update written by hand) is not part of a model's
forward pass, and is not cast. The outputs of the outermost module call are fp32.

A program that turns out to compute in half precision itself is left alone.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.casting import Casts, Switches
from autoamp.modules.meetings import meeting_builders
from autoamp.patching import imitate
from autoamp.tensors import HALF_DTYPES, iter_tensors, map_tensors

__all__ = ["AUTOCAST", "ModuleCasts"]

AUTOCAST = "torch.autocast"
"""What `ModuleCasts.waits_for` and `ModuleCasts.left_to` call the program's own regions."""

log = logging.getLogger(__name__)

# What may change the dtype of a module's parameters.
_CONVERSIONS = ("bfloat16", "double", "float", "half", "to", "type")
# The value of ``ThreadState.on`` when a module's constructor was called within the call of another module, and may be
# running still. It counts as false.
_PAUSED: Any = ()


class ModuleCasts(Casts):
    """Casts within the calls of modules, and of what is computed from their outputs.

    Attributes:
        left_to: By what the program itself computes in half precision, so that nothing is cast; None while nothing of
            the kind was seen.
        waits_for: The call, as the program's source has it, that must come before anything is cast; None where there is
            none.
        on_left: Called once with ``left_to``, when that is set.
        waited_until_step: That call, where it had not come when an optimizer stepped; else None.
        own_dtypes: The half dtypes that the program itself computes in, as far as they were seen: those of its models,
            and those of its enabled autocast regions by how often it entered them.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True) -> None:
        super().__init__(dtype, device_type, enable_caching=enable_caching, on=None)
        self.left_to: str | None = None
        self.waits_for: str | None = None
        self.waited_until_step: str | None = None
        self.on_left: Callable[[str], None] = lambda whom: None
        self.own_dtypes: Counter[torch.dtype] = Counter()
        self._awaited: Callable[[], str | None] | None = None
        self._trains = False
        # By id the modules that were found to have no half parameters. Not a WeakSet, which Dynamo cannot trace.
        self._seen: dict[int, weakref.ref[Module]] = {}

    def wait_for(self, awaited: Callable[[], str | None]) -> None:
        """Cast nothing before the program has set up mixed precision itself, if its source has a call that does so.

        That ends with the first step of an optimizer: a program that trains by then will not make the call.

        Args:
            awaited: Returns that call as the source has it, None where there is none. Asked before each outermost call
                until it says one or an optimizer steps, as modules may be imported meanwhile: it is to answer at once
                where none were.
        """
        self._awaited = awaited

    def note_step(self) -> None:
        """Take note that an optimizer steps: a program without mixed precision by now will not set it up later."""
        self._trains, self._awaited = True, None
        self.waited_until_step = self.waits_for or self.waited_until_step
        self._wait_no_more("trains without it")

    def _wait_no_more(self, why: str) -> None:
        if self.waits_for is not None and self.left_to is None:
            log.info("the program calls %s and %s: casts are on from here", self.waits_for, why)
            self.waits_for = None
            self._turn(None)

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Take note that the program enters a region: one where it trains, or that was waited for, rules from now on.

        From then on nothing of the program is cast but by torch within such regions, as under plain Python. A region
        for an evaluation says nothing of how a program trains that casts were on for already.
        """
        if torch.compiler.is_compiling():
            return
        if device_type != self.device_type:
            if self.waits_for == AUTOCAST:
                self._wait_no_more(f"means {device_type} by it")
            return
        if enabled:
            self.own_dtypes[torch.get_autocast_dtype(device_type)] += 1
            if self.left_to is not None and self.left_to.endswith("GradScaler"):
                # What it scales for.
                self.left_to = AUTOCAST
        waited = self.waits_for == AUTOCAST or (enabled and self.waits_for is not None)
        if waited or (enabled and torch.is_grad_enabled()):
            self.leave_to(AUTOCAST)

    def leave_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Cast nothing any more: the program itself computes in half precision, in these dtypes if they are known."""
        self.own_dtypes.update(dtypes)
        if self.left_to is None:
            self.left_to, self.waits_for, self._awaited = whom, None, None
            self._turn(False)
            log.info("the program has %s: casts are left to it", whom)
            self.on_left(whom)

    def _turn(self, on: bool | None) -> None:
        """Turn casts off for all threads, or with None let calls decide again."""
        self._on = on
        if self.is_open:
            # Only the default: a thread that is within a module's call has set its own switches until the call ends.
            self.local.set_default(on, forced_off=on is False)

    def _has_begun(self) -> bool:
        """Tell whether anything may be cast yet, or a call of the program is waited for."""
        awaited = self._awaited
        if awaited is not None and self.waits_for is None and not torch.compiler.is_dynamo_compiling():
            self.waits_for = awaited()
            if self.waits_for is not None:
                log.info("the program calls %s: nothing is cast before", self.waits_for)
                self._turn(False)
        return self.waits_for is None

    def _takes(self, module: Module) -> bool:
        """Tell whether a module's call is to be cast: not where the program has half parameters in it.

        Such a module before the first step means that the program does its own mixed precision.
        """
        known = self._seen.get(id(module))
        if known is not None and known() is module:
            return True
        dtype = next((parameter.dtype for parameter in module.parameters() if parameter.dtype in HALF_DTYPES), None)
        if dtype is None:
            key, seen = id(module), self._seen
            seen[key] = weakref.ref(module, lambda _: seen.pop(key, None))
        elif not self._trains:
            self.leave_to(f"{type(module).__name__} in {str(dtype).removeprefix('torch.')}", [dtype])
        # After the first step a half module may be a copy to save or evaluate: only its own calls are not cast.
        return dtype is None

    def state(self) -> bool | None:
        """Tell whether this thread casts now; None where each call decides by its arguments."""
        local = self.local
        on: bool | None = local.on
        paused = on is _PAUSED
        if torch.compiler.is_dynamo_compiling() or not (paused or (on is None and local.constructing)):
            return True if paused else on
        # The end of a constructor cannot be seen, so whether one is still running is looked up on the stack.
        if _in_constructor(sys._getframe(1)):
            return False
        local.constructing = False
        if paused:
            local.on = on = True
        return on

    def switches(self, args: Sequence[Any] = ()) -> Switches:
        """Return how this thread casts now, for `ThreadState.set`; on where a tensor in ``args`` requires gradients."""
        on, forced_off = super().switches()
        if on is None and any(tensor.requires_grad for tensor in iter_tensors(args)):
            on = True
        return on, forced_off

    def remembered(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Callable[..., Any]:
        """Wrap a function as `Casts.remembered` does. Where ``args`` turn casts on, half outputs become fp32."""
        run, on = super().remembered(function, args), self.state()
        if on is not None or not self.switches(args)[0]:
            return run
        return lambda *args, **kwargs: self._widened(run(*args, **kwargs))

    def wants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call is to be cast: within a module's call, or because of its arguments (see `_derives`)."""
        on = self.state()
        return on if on is not None else _derives((args, kwargs), self.dtype) and self._has_begun()

    def passing(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replacement calls where `ThreadState.on` is false: it asks `wants`, and casts after all."""
        local = self.local

        def passed(*args: Any, **kwargs: Any) -> Any:
            within = self.state() is not None
            if not self.wants(args, kwargs):
                return original(*args, **kwargs)
            # Who is given half tensors gets them; elsewhere the program knows of none.
            widens = not within and not self.autocast_rules() and not _any_of(self.dtype, (args, kwargs))
            token = local.set(True)
            try:
                outputs = replacement(*args, **kwargs)
            finally:
                local.reset(token)
            return self._widened(outputs) if widens else outputs

        return passed

    def around_outermost(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a module's call that is within no other module's call: it turns casts on."""
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
            # In an autocast region of the program outputs have the dtypes that torch gives them.
            return self._widened(outputs) if within and not self.autocast_rules() else outputs

        return outermost

    def _widened(self, outputs: Any) -> Any:
        """Return nested outputs with tensors of the half dtype cast to fp32."""
        half, device_type = self.dtype, self.device_type

        def widen(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype is half and tensor.device.type == device_type else tensor

        return map_tensors(outputs, widen)

    def evaluating(self) -> Any:
        """Let calls in a closure decide by their arguments: an optimizer calls it in its step, where casts are off."""
        return self.switched(None)

    def builders(self) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what else is to be patched: what makes and changes modules, and where half tensors meet others."""
        return [
            (Module, "__init__", self._build_init),
            *((Module, name, self._build_conversion) for name in _CONVERSIONS),
            *meeting_builders(self),
        ]

    def _build_init(self, original: Any) -> Any:
        """Build the replacement of `Module.__init__`: it notes that a constructor may be running."""
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
        """Build the replacement of a method that may change dtypes: modules are looked at again after it."""
        seen, compiling = self._seen, torch.compiler.is_dynamo_compiling

        def convert(module: Module, *args: Any, **kwargs: Any) -> Any:
            if not compiling():
                seen.clear()
            return original(module, *args, **kwargs)

        return imitate(convert, original)


def _is_torchs(cls: type) -> bool:
    """Tell whether a class is torch's own: casts need not stop for its constructor, which computes no tables.

    Nor may they: Dynamo makes modules of torch while it traces.
    """
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
    """Tell whether a tensor among nested arguments is half, or requires gradients while these are recorded."""
    records = torch.is_grad_enabled()
    return any(tensor.dtype is half or (records and tensor.requires_grad) for tensor in iter_tensors(values))


def _any_of(dtype: torch.dtype, values: Any) -> bool:
    return any(tensor.dtype is dtype for tensor in iter_tensors(values))
