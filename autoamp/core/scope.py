"""Where casts are on: in calls of modules, in regions of torch.autocast, and what torch is told of it.

The replacement of `torch.nn.Module.__call__` calls torch's own ``__call__`` once. Before the outermost call half
parameters take what the program wrote to their masters. The call keeps casts until it returns; a module or model may
have a precision of its own. A call of a module within another that has none goes on to torch at once. A module gets
nothing but tags, so it deep-copies and pickles as it would without autoamp.

``init(scope="modules")`` is for programs written without mixed precision. Listed ops inside a module's call are cast,
and the outputs of the outermost module are converted to fp32. The outermost module is the first one that has
parameters. Outside of modules an op is cast only if one of its arguments is in half precision already. Nothing is cast
for a program that casts by itself: with `torch.autocast`, a half model or an `FP16_Optimizer`.

The program's own torch.autocast regions: in an enabled one torch casts, and `CastState.eligible` steps aside; the casts
are told of it, since a program that has such regions may mean the rest to be fp32. One in our half dtype within a call
that we cast changes nothing: our casts go on. Who enters a disabled one asks torch for no casts and gets none of ours
either. It leaves no trace to ask for, so it is seen on the way in and out. Within a call it may be of any device type:
it protects what it stands around, wherever that runs. Only those regions count that the program enters: torch itself
enters some to restore what it found earlier, in worker threads, in backward and while Dynamo traces.

Attention modules, custom functions and key-value caches choose a dtype by `torch.is_autocast_enabled`. They hear of our
casts. Torch itself does not, for it stores the answers to put its own state back later; the exceptions are two:
`torch.amp.custom_fwd`, which casts inputs by the answer, and a region without a dtype, which takes the one in use. What
sets the state to what it was told sets our casts.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.parametrize import ParametrizationList

from autoamp.core.attach import masters_to_model
from autoamp.core.casts import HALF_MODEL, CastState, ThreadMode, ThreadState, Token, TracedMode
from autoamp.core.half_models import ModelBoundary, cast_structure
from autoamp.core.listeners import Listeners
from autoamp.core.patch_sites import Place
from autoamp.core.patches import original_of
from autoamp.core.rules import ModulePrecision
from autoamp.core.settings import TAGS, ModulePrecisions, ModuleTags
from autoamp.errors import line_of_user
from autoamp.tensors import CASTABLE_LAYOUTS, HALF_DTYPES, dtype_name, iter_tensors, map_tensors
from autoamp.torch_private import (
    disable_in_dynamo,
    is_replica,
    mark_constant,
    name_in_frame,
    renew_compiled_model,
    start_no_graph,
    trace_as,
    traced_frames,
    tracing_state,
)

AUTOCAST = "torch.autocast"
"""What `ScopedCasts.yielded_to` calls the program's own regions."""

log = logging.getLogger(__name__)


class ScopedCasts(CastState):
    """Casts within calls of modules, until the program is seen to cast by itself."""

    in_modules = True

    def __init__(self, dtype: torch.dtype, device_type: str, *, enable_caching: bool = True) -> None:
        super().__init__(dtype, device_type, enable_caching=enable_caching, on=None)
        # The models that are cast, each with what its first parameter was when all of them were looked through.
        self._cast_models: weakref.WeakKeyDictionary[Module, tuple[torch.dtype, bool]] = weakref.WeakKeyDictionary()
        self._trains = False

    @property
    def has_cast_models(self) -> bool:
        """Whether a model that still exists was cast."""
        return bool(self._cast_models)

    def note_step(self) -> bool:
        """Note that an optimizer has stepped. Where a model was cast before, half models may now be copies of it."""
        self._trains = self._trains or self.has_cast_models
        return self._trains

    def note_autocast(self, device_type: str, *, enabled: bool) -> None:
        """Note that the program enters a region. One with gradients on means that the program casts by itself.

        A region for an evaluation does not say how the program trains.
        """
        if not enabled or device_type != self.device_type or torch.compiler.is_compiling():
            return
        self.own_dtypes[torch.get_autocast_dtype(device_type)] += 1
        if torch.is_grad_enabled():
            self.yield_to(AUTOCAST)

    def obeys_disabled(self, mode: ThreadMode | TracedMode) -> bool:
        """Whether a disabled region that begins now is an exception; else it is the program's AMP switch, which is off.

        A switch is outside of every module's call, in a program that opens no enabled region.
        """
        return mode.on is not None or self.thread.bare_calls > 0 or bool(self.own_dtypes)

    def yield_to(self, whom: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Note that the program casts by itself. From now on nothing is cast for it, and no loss scaled."""
        self.own_dtypes.update(dtypes)
        if self.yielded_to is None:
            self.yielded_to, self._on = whom, False
            if self.enabled:
                # Only the default: a thread that is within a module's call has its own switches until the call ends.
                self.thread.set_default(False, forced_off=True)
            log.info("the program has %s: autoamp does not cast, and does not scale its losses", whom)

    def begin_call(self, module: Module) -> bool | None:
        """Whether casts are to be on within the call of a module: an outermost call of a model that is not half.

        A half model means that the program casts by itself. One that is called without gradients, after a model that
        is cast was trained, may be a copy to evaluate: then its own call alone is left alone.

        None of a module without any parameters, such as a metric or an augmentation, which a program of torch.amp calls
        outside of its region: modules that it calls are asked as outside of it.
        """
        if self.thread.now().on is not None:
            return False
        first = next(module.parameters(), None)
        if first is None and not is_replica(module):
            return None
        half = None if first is None else self._half_dtype(module, first)
        if half is None:
            return True
        if not torch.compiler.is_dynamo_compiling() and (torch.is_grad_enabled() or not self._trains):
            self.yield_to(f"{type(module).__name__} in {dtype_name(half)}", [half])
        return False

    def _half_dtype(self, module: Module, first: Parameter) -> torch.dtype | None:
        """Return the half dtype of a half model, which trains some parameters in half precision; else None.

        Where all parameters are frozen, each counts. All are looked through at a model's first call, and again once its
        first parameter has changed: a large model has hundreds.
        """
        known = first.dtype, first.requires_grad
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and self._cast_models.get(module) == known:
            return None
        params = list(module.parameters())
        counted = [param for param in params if param.requires_grad] or params
        half = next((param.dtype for param in counted if param.dtype in HALF_DTYPES), None)
        if half is None and not compiling:
            self._cast_models[module] = known
        return half

    def wants(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call is to be cast: within a module's call, or because an argument is in the half dtype."""
        on = self.thread.now().on
        return self._has_half(args, kwargs) if on is None else on is True

    def _has_half(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return any(tensor.dtype is self.dtype for tensor in iter_tensors((args, kwargs)))

    def outside_modules(
        self, original: Callable[..., Any], replacement: Callable[..., Any], local: ThreadState | TracedMode
    ) -> Callable[..., Any]:
        """Return what a replacement calls outside of modules' calls: it casts if an argument is in the half dtype."""
        has_half, cast = self._has_half, self.thread.with_mode(replacement, True)

        def outside(*args: Any, **kwargs: Any) -> Any:
            return (cast if local.mode.on is None and has_half(args, kwargs) else original)(*args, **kwargs)

        return outside


PROTECTED = torch.float32
"""What `custom_fwd` notes as the dtype of a function that casts its inputs, and gives to the region of its backward.

No enabled region has it, so by it a backward is known that is to run without casts, as its forward did."""

_AMP = "torch.amp.autocast_mode"
_BY_SETTER: Any = "by a setter"
"""`ThreadMode.forced_off` where the program turned casts off by `torch.set_autocast_enabled`, and may turn them on."""

_DEVICES = {"": None, "cpu_": "cpu", "gpu_": "cuda", "ipu_": "ipu", "xla_": "xla"}
"""What stands in the names of torch's functions, and the device type that it means."""


def autocast_functions(casts: CastState) -> Iterator[Place]:
    """Yield where each function is, and what builds its replacement."""
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
    return casts.thread.now().on is True and not casts.autocast_rules()


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
    local = casts.thread

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
        is_ours = is_told and (_are_on(casts) or casts.thread.mode.forced_off is _BY_SETTER)
        return None if is_ours else original(*args, **kwargs)

    return disable_in_dynamo(set_dtype)


# Where torch enters a region in the program's name: as a decorator, through the classes by device, and for a custom
# function whose inputs it casts.
_IN_THE_PROGRAMS_NAME = frozenset({"decorate_autocast", "__enter__", "decorate_fwd"})
# Whose functions stand around what runs in a module's call, and around what is run again later as in that call.
_AROUND_CALLS = frozenset({"autoamp.core.scope", ThreadState.__module__})


@dataclass(eq=False)
class AutocastRegions:
    """Turns one handle's casts off within disabled autocast regions, in their thread.

    Regions of all kinds are told to `CastState.note_autocast`, but for those that our casts take the place of.

    Attributes:
        casts: The casts of the handle.
        goes_on: Whether our casts go on in an enabled region of their dtype, within a call that they cast.
    """

    casts: CastState
    goes_on: bool

    def autocast_entered(self, region: torch.autocast) -> None:
        """Turn casts off in a disabled region of the program."""
        casts, local, traced = self.casts, self.casts.thread, traced_frames()
        is_ours = region.device == casts.device_type
        # Dynamo enters the regions of the code that it traces.
        if not _is_the_programs(region, traced[0] if traced else next(_frames())):
            return
        on = local.traced.on if traced else local.mode.on
        goes_on = self.goes_on and region._enabled and is_ours and region.fast_dtype is casts.dtype
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
        return self.casts.in_modules or any(caller_of(frame)[0] in _AROUND_CALLS for frame in frames)

    def autocast_left(self, region: torch.autocast, error: BaseException | None) -> None:
        """Turn casts on again."""
        local = self.casts.thread
        if local.regions and local.regions[-1][0] is region:
            if isinstance(error, Exception):
                self.casts.explain(error)
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


# What casts a tensor, and what casts it where a call is made again.
_CAST_METHODS = frozenset({torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float, torch.Tensor.to})


@dataclass(eq=False)
class ModuleCalls:
    """Stands around calls of modules. What runs later or in another thread casts as its caller did.

    That is what `torch.utils.checkpoint` runs again in backward, where the module around it has returned, and with it
    the precision that it ran in; the backward of a custom function; and the threads of `torch.nn.DataParallel`.

    Attributes:
        casts: The state that calls read and set.
        precisions: Which modules run in a precision of their own.
        boundaries: In which dtypes models take inputs and give outputs.
        listeners: Hear of outermost calls.
    """

    casts: CastState
    precisions: ModulePrecisions
    boundaries: ModuleTags[ModelBoundary]
    listeners: Listeners
    _has_told_of_export: bool = False

    def around_module_call(self, original: Any) -> Any:
        """Return the replacement of ``torch.nn.Module.__call__``."""
        casts, precisions, boundaries, listeners = self.casts, self.precisions, self.boundaries, self.listeners
        local, cache, in_modules = casts.thread, casts.cache, casts.in_modules
        compiling = torch.compiler.is_dynamo_compiling
        no_class_rules, has_rules = not precisions.has_class_rules, precisions.has_rules

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
            elif in_modules and isinstance(module, ParametrizationList) and local.now().on is None:
                # The program reads a weight, or takes its parametrization away, outside of models.
                tokens.append(local.set(False))
            elif in_modules and (begun := casts.begin_call(module)):
                tokens.append(local.set(True))
                widens = not casts.autocast_rules()
            return widens, begun is None

        # Most calls are within another one, which keeps casts, and end at the first line. torch's profiler reads the
        # variable `self` of this frame as it begins.
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            if no_class_rules and not compiling() and local.param_casts is not None and TAGS not in self.__dict__:
                return original(self, *args, **kwargs)
            result, told = None, []
            if compiling():
                # Dynamo guards on all that is read here, so that code compiled for another handle or for other tags
                # does not pass for this. `forced_off` is never None.
                if not (in_modules or precisions.any or boundaries.values) and local.now().forced_off is not None:
                    return original(self, *args, **kwargs)
            else:
                if local.param_casts is None:
                    masters_to_model()
                told = [begun(self, args, kwargs) for begun in listeners.call_begun]
            tokens: list[Token] = []
            dtypes, keeps_casts, widens, is_bare = None, False, False, False
            try:
                try:
                    if in_modules or has_rules or precisions.any or boundaries.values:  # modules are not alike
                        dtypes = boundaries.get(self)
                        if dtypes is not None:
                            args, kwargs = cast_structure((args, kwargs), dtypes.inputs, doubles=dtypes.doubles)
                            tokens += dtypes.switch(casts)
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
                    outputs = _cast_nested(outputs, partial(_widened, casts=casts))
                result = outputs if dtypes is None else cast_structure(outputs, dtypes.outputs)
                return result
            finally:
                if told:
                    with contextlib.ExitStack() as stack:
                        # Each is called, also where a warning of one is an error.
                        for ended in filter(None, reversed(told)):
                            stack.callback(ended, result)

        for layer in listeners.module_layer:
            call = layer(call)
        return call

    def around_compiled_call(self, original: Any) -> Any:
        """Return what calls a compiled model by the replacement above, also if it was compiled before."""

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                renew_compiled_model(self, lambda one: original_of(one) is not one)
            return original(self, *args, **kwargs)

        return call

    def around_export(self, original: Any) -> Any:
        """Return a function that makes a graph of a model, and logs once that this graph has half nodes."""

        def export(model: Any, *args: Any, **kwargs: Any) -> Any:
            casts, is_told = self.casts, self._has_told_of_export
            if casts.in_modules and casts.thread.mode.on is None and not is_told and isinstance(model, Module):
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

    def around_causal_bias(self, original: Any) -> Any:
        """Return a ``__torch_function__`` of torch's `CausalBias`, a mask without values, that works under casts.

        Torch's own compares what is called with ``torch.nn.functional.scaled_dot_product_attention``, where a
        replacement stands, and would go by memory that nobody has written. A cast leaves such a mask as it is.
        """

        own = original_of(torch.nn.functional.scaled_dot_product_attention)

        def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in _CAST_METHODS:
                return args[0]
            func = torch.nn.functional.scaled_dot_product_attention if func is own else func
            return original.__func__(cls, func, types, args, kwargs)

        return classmethod(torch_function)

    def step_ended(self) -> bool:
        """Note that an optimizer has stepped. Returns whether nothing follows from later steps."""
        self.precisions.warn_of_unmatched()
        return self.casts.note_step()

    def runs_later(self, function: Any) -> Any:
        """Return a function that casts as this thread does now."""
        return self.casts.thread.with_mode(function, *self.casts.mode())

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
            if noted is not casts or mode == casts.mode() or not casts.enabled:
                return apply(context, *args)
            return casts.thread.with_mode(apply, *mode)(context, *args)

        return apply_as_noted


def _widened(tensor: Tensor, casts: CastState) -> Tensor:
    """Return a model's output in fp32, or complex64 for half complex numbers."""
    if tensor.dtype is torch.complex32 and tensor.device.type == casts.device_type and not casts.autocast_rules():
        return tensor.to(torch.complex64)
    widened: Tensor = casts.to_fp32(tensor)
    return widened


def _cast_nested(value: Any, cast: Callable[[Any], Any]) -> Any:
    return map_tensors(value, lambda tensor: cast(tensor) if tensor.layout in CASTABLE_LAYOUTS else tensor)
