"""The replacement of `torch.nn.Module.__call__`.

The outermost call keeps parameter casts until it returns, modules run in a precision of their own, and models in half
precision take inputs and give outputs in dtypes of their own. What torch's own ``__call__`` would do without hooks is
done without its frames. A module gets nothing but tags, so a model deep-copies and pickles as it would without.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from autoamp import torch_private
from autoamp.casting import Casts
from autoamp.modules.half_models import ForwardDtypes
from autoamp.modules.precisions import ModulePrecisions
from autoamp.modules.shortcuts import Shortcuts, skips_call_impl
from autoamp.modules.tags import TAGS, ModuleTags
from autoamp.patching import imitate
from autoamp.rules import ModulePrecision
from autoamp.tensors import CASTABLE_LAYOUTS, map_tensors

__all__ = ["CallRecorder", "build_module_call"]

# What Module.__call__ looks up, as long as it only chooses which implementation to call.
_NAMES = ("_compiled_call_impl", "_call_impl")


class CallRecorder(Protocol):
    """Who takes note of outermost module calls.

    Attributes:
        inside: Its attribute ``call`` is true in a thread whose outermost call is being recorded: those within are not.
    """

    @property
    def inside(self) -> Any:
        """Tells of each thread."""

    def record(self, call: Callable[..., Any], module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module, by ``call(module, *args, **kwargs)``, and return its result."""


def build_module_call(
    original: types.FunctionType,
    casts: Casts,
    precisions: ModulePrecisions,
    forward_dtypes: ModuleTags[ForwardDtypes],
    recorder: CallRecorder | None = None,
) -> Any:
    """Build the replacement of ``torch.nn.Module.__call__``.

    Args:
        original: What is replaced.
        casts: The state that the replacement reads.
        precisions: Which modules run in a precision of their own.
        forward_dtypes: In which dtypes models take inputs and give outputs.
        recorder: Who takes note of outermost calls; None where nobody does.
    """
    common = original, casts, precisions, forward_dtypes, Shortcuts()
    unrecorded = _build(*common)
    return unrecorded if recorder is None else _build(*common, recorder, unrecorded)


def _build(
    original: types.FunctionType,
    casts: Casts,
    precisions: ModulePrecisions,
    forward_dtypes: ModuleTags[ForwardDtypes],
    shortcuts: Shortcuts,
    recorder: CallRecorder | None = None,
    unrecorded: Any = None,
) -> Any:
    local, cache, dtypes_by_tag = casts.local, casts.cache, forward_dtypes.values
    compiling, trace = torch.compiler.is_dynamo_compiling, torch_private.tracing_state
    # Torch's own does no more than choose an implementation, which without hooks does no more than call forward().
    wrapped, implementation = vars(Module).get("_wrapped_call_impl"), torch_private.MODULE_CALL
    known = original is wrapped and original.__code__.co_names == _NAMES and skips_call_impl()
    for_all = torch.nn.modules.module
    shortcut_of, refresh = shortcuts.by_class, shortcuts.refresh
    inside: Any = None if recorder is None else recorder.inside

    def scoped(self: Module, *args: Any, **kwargs: Any) -> Any:
        if local.entries is not None or not cache.enabled:
            return original(self, *args, **kwargs)
        if self.__dict__.get("_modules"):
            # For the modules within, which have shortcuts. Once for all of them: it takes a microsecond.
            refresh()
        # Written out, since a context manager would cost more than the rest of a small call.
        local.entries = {}
        try:
            return original(self, *args, **kwargs)
        finally:
            local.entries = local.last = None

    # Compiled code keeps no casts from call to call: a compiler shares them itself.
    outermost, traced = casts.around_outermost(scoped), casts.around_outermost(original)

    def in_precision(precision: ModulePrecision | None, self: Module, args: Any, kwargs: Any) -> Any:
        run = traced if compiling() else outermost
        if precision is None:
            return run(self, *args, **kwargs)
        within = precision is ModulePrecision.FP16
        goes_on_in_fp32 = within and casts.state() is not True
        args, kwargs = _inputs(precision, casts, (args, kwargs))
        token = local.set(within)
        try:
            output = run(self, *args, **kwargs)
        finally:
            local.reset(token)
        # Code around that casts nothing, such as an fp32 module's, could not use a half result.
        return _cast_nested(output, casts.to_fp32) if goes_on_in_fp32 else output

    def model_call(self: Module, args: Any, kwargs: Any) -> Any:
        # Asked within: the model's own switches say whether precision by module counts.
        precision = precisions.of(self) if precisions.any and not local.forced_off else None
        return in_precision(precision, self, args, kwargs)

    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        compiles = compiling()
        # A frame of its own for the outermost call alone.
        if recorder is not None and not compiles and not inside.call:
            return recorder.record(unrecorded, self, args, kwargs)
        if dtypes_by_tag and TAGS in self.__dict__:
            tag = forward_dtypes.find(self)
            if tag is not None:
                return dtypes_by_tag[tag].around(model_call, casts, self, args, kwargs)
        if precisions.any and not local.forced_off:
            precision = precisions.of(self)
            if precision is not None:
                return in_precision(precision, self, args, kwargs)
        # Never None: reading it makes Dynamo guard on this handle, or code compiled for another would pass for ours.
        if compiles and local.forced_off is not None:
            return traced(self, *args, **kwargs)
        if local.entries is None or not known:
            return outermost(self, *args, **kwargs)
        own, cls = self.__dict__, type(self)
        try:
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or for_all._global_forward_hooks
                or for_all._global_forward_pre_hooks
                or for_all._global_backward_hooks
                or for_all._global_backward_pre_hooks
                or self._compiled_call_impl is not None
                or "_call_impl" in own
                or cls._call_impl is not implementation
                or trace() is not None
            ):
                return original(self, *args, **kwargs)
        except KeyError:
            # Its class did not call Module.__init__(). Torch raises the error for that.
            return original(self, *args, **kwargs)
        if cls in shortcut_of and len(args) == 1 and not kwargs and type(args[0]) is Tensor and "forward" not in own:
            return shortcut_of[cls](self, own, args[0])
        return self.forward(*args, **kwargs)

    return imitate(call, original)


def _inputs(precision: ModulePrecision, casts: Casts, inputs: Any) -> Any:
    if precision is ModulePrecision.NONE:
        return inputs
    return _cast_nested(inputs, casts.to_fp32 if precision is ModulePrecision.FP32 else casts.to_half)


def _cast_nested(value: Any, cast: Callable[[Any], Any]) -> Any:
    return map_tensors(value, lambda tensor: cast(tensor) if tensor.layout in CASTABLE_LAYOUTS else tensor)
