"""The replacement of `torch.nn.Module.__call__`, which calls torch's own ``__call__`` once.

Before the outermost call half parameters take what the program wrote to their masters. The call keeps casts until it
returns; a module or model may have a precision of its own. A call of a module within another that has none goes on to
torch at once. A module gets nothing but tags, so it deep-copies and pickles as it would without autoamp.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from autoamp.core.casts import CastState
from autoamp.core.half_models import ForwardDtypes, cast_structure
from autoamp.core.links import refresh_params
from autoamp.core.listeners import Listeners
from autoamp.core.precisions import ModulePrecisions
from autoamp.core.rules import ModulePrecision
from autoamp.core.tags import TAGS, ModuleTags
from autoamp.core.threads import HALF_MODEL, Token
from autoamp.tensors import CASTABLE_LAYOUTS, dtype_name, map_tensors
from autoamp.torch_private import tracing_state

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ModuleCalls:
    """Stands around calls of modules. What runs later or in another thread casts as its caller did.

    That is what `torch.utils.checkpoint` runs again in backward, where the module around it has returned, and with it
    the precision that it ran in; the backward of a custom function; and the threads of `torch.nn.DataParallel`.

    Attributes:
        casts: The state that calls read and set.
        precisions: Which modules run in a precision of their own.
        forward_dtypes: In which dtypes models take inputs and give outputs.
        listeners: Hear of outermost calls.
    """

    casts: CastState
    precisions: ModulePrecisions
    forward_dtypes: ModuleTags[ForwardDtypes]
    listeners: Listeners
    _has_told_of_export: bool = False

    def around_module_call(self, original: Any) -> Any:
        """Return the replacement of ``torch.nn.Module.__call__``."""
        casts, precisions, forward_dtypes, listeners = self.casts, self.precisions, self.forward_dtypes, self.listeners
        local, cache, in_modules = casts.local, casts.cache, casts.in_modules
        compiling = torch.compiler.is_dynamo_compiling
        has_class_rules, has_rules = precisions.has_class_rules, precisions.has_rules

        def precision_of(module: Module) -> ModulePrecision | None:
            # After `dtypes.switch`, which lifts a default that forces casts off outside of models. In half models
            # `initialize` has cast the modules with a precision of their own.
            mode = local.now()
            return None if mode.forced_off or mode.on == HALF_MODEL else precisions.get(module)

        def switch(module: Module, precision: ModulePrecision | None, tokens: list[Token]) -> tuple[bool, bool]:
            """Set the switches of a call. Returns whether outputs become fp32, and whether there are no parameters."""
            widens = False
            begun: bool | None = False
            if precision is not None:
                # Code around that casts nothing, such as an fp32 module's, could not use a half result.
                widens = precision is ModulePrecision.FP16 and local.now().on is not True
                tokens.append(local.set(precision is ModulePrecision.FP16))
            elif in_modules and (begun := casts.begin_call(module)):
                tokens.append(local.set(True))
                widens = not casts.autocast_rules()
            return widens, begun is None

        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            result, told = None, []
            if compiling():
                # Dynamo guards on all that is read here, so that code compiled for another handle or for other tags
                # does not pass for this. `forced_off` is never None.
                if not (in_modules or precisions.any or forward_dtypes.values) and local.now().forced_off is not None:
                    return original(self, *args, **kwargs)
            elif local.param_casts is not None and TAGS not in self.__dict__ and not has_class_rules:
                return original(self, *args, **kwargs)
            else:
                if local.param_casts is None:
                    refresh_params()
                if listeners.call_begun:
                    told = [begun(self, args, kwargs) for begun in listeners.call_begun]
            tokens: list[Token] = []
            dtypes, look, keeps_casts, widens, is_bare = forward_dtypes.get(self), None, False, False, False
            try:
                try:
                    if dtypes is not None:
                        args, kwargs = cast_structure((args, kwargs), dtypes.inputs, doubles=dtypes.doubles)
                        tokens += dtypes.switch(casts)
                        if not compiling() and dtypes.buffers is not None:
                            look = dtypes.buffers.begin(self)
                    # `initialize` looks up the paths of models that it casts.
                    outermost = has_rules and not compiling() and local.param_casts is None and dtypes is None
                    if outermost and (in_modules or local.now().on is True):
                        precisions.begin_model(self)
                    precision = precision_of(self)
                    if precision is not None and precision is not ModulePrecision.NONE:
                        cast = casts.to_fp32 if precision is ModulePrecision.FP32 else casts.to_half
                        args, kwargs = _cast_nested((args, kwargs), cast)
                    widens, is_bare = switch(self, precision, tokens)
                    # Compiled code keeps no casts from call to call: a compiler shares them itself. Nor does
                    # `torch.jit.trace`, whose check traces again and finds another graph.
                    if not compiling():
                        if is_bare:
                            local.bare_calls += 1
                        elif local.param_casts is None and cache.enabled and tracing_state() is None:
                            local.param_casts, keeps_casts = {}, True
                    outputs = original(self, *args, **kwargs)
                except Exception as error:
                    if not compiling():
                        casts.explain(error)
                    raise
                finally:
                    if keeps_casts:
                        local.param_casts = local.last_activation = None
                    if is_bare and not compiling():
                        local.bare_calls -= 1
                    while tokens:
                        local.reset(tokens.pop())
                if widens:
                    outputs = _cast_nested(outputs, casts.to_fp32)
                if look is not None:
                    look()
                result = outputs if dtypes is None else cast_structure(outputs, dtypes.outputs)
                return result
            finally:
                for ended in filter(None, told):
                    ended(result)

        for layer in listeners.module_layer:
            call = layer(call)
        return call

    def around_export(self, original: Any) -> Any:
        """Return a function that makes a graph of a model, and logs once that this graph has half nodes."""

        def export(model: Any, *args: Any, **kwargs: Any) -> Any:
            casts, is_told = self.casts, self._has_told_of_export
            if casts.in_modules and casts.local.mode.on is None and not is_told and isinstance(model, Module):
                self._has_told_of_export = True
                log.warning(
                    "the graph of %s has %s nodes, as its calls are cast; for one in fp32 export it within "
                    "`with autoamp.current_handle().disable_casts():`",
                    type(model).__name__, dtype_name(casts.dtype),
                )  # fmt: skip
            with contextlib.ExitStack() as stack:
                for begun in self.listeners.export_begun:
                    stack.enter_context(begun())
                return original(model, *args, **kwargs)

        return export

    def step_ended(self) -> None:
        """Note that an optimizer has stepped."""
        self.casts.note_step()
        self.precisions.warn_of_unmatched()

    def runs_later(self, function: Any) -> Any:
        """Return a function that casts as this thread does now."""
        return self.casts.local.with_mode(function, *self.casts.mode())

    def function_called(self, context: Any) -> None:
        """Note how this thread casts in the forward of a custom function."""
        context._autoamp_mode = self.casts, self.casts.mode()

    def around_function_backward(self, apply: Any) -> Any:
        """Return what runs the backward of a custom function, which casts as its forward did.

        The thread may be another one, of autograd's own on CUDA, and ``with`` statements around the forward have ended.
        """
        casts = self.casts

        def apply_as_noted(context: Any, *args: Any) -> Any:
            noted, mode = vars(context).get("_autoamp_mode", (None, None))
            if noted is not casts or mode == casts.mode() or not casts.is_open:
                return apply(context, *args)
            return casts.local.with_mode(apply, *mode)(context, *args)

        return apply_as_noted


def _cast_nested(value: Any, cast: Callable[[Any], Any]) -> Any:
    return map_tensors(value, lambda tensor: cast(tensor) if tensor.layout in CASTABLE_LAYOUTS else tensor)
