"""What the runtime does around a module's call.

The outermost call keeps parameter casts, modules run in a precision of their own, and models in half precision take
inputs and give outputs in dtypes of their own: all in one replacement of `torch.nn.Module.__call__`. A module gets
nothing but tags, so a model deep-copies and pickles as it would without.

What is recomputed in backward runs as it did in forward, and what `torch.nn.DataParallel` runs in threads of its own as
its caller does.
"""

from __future__ import annotations

import difflib
import fnmatch
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp import torch_private
from autoamp.casting import Casts
from autoamp.errors import PatchError, UsageError, warn_user
from autoamp.modules.half_models import ForwardDtypes
from autoamp.modules.shortcuts import DirectCalls, skips_call_impl
from autoamp.modules.tags import TAGS, ModuleTags
from autoamp.patching import dress, resolve
from autoamp.rules import ModulePrecision, ModuleRule
from autoamp.tensors import CASTABLE_LAYOUTS, map_tensors

__all__ = [
    "ModulePrecisions",
    "Override",
    "build_function_backward",
    "build_function_context",
    "build_module_call",
    "build_parallel_apply",
    "build_recompute",
]

_GLOB = frozenset("*?[")
# What Module.__call__ looks up, as long as it only chooses which implementation to call.
_NAMES = ("_compiled_call_impl", "_call_impl")


class Override:
    """Modules that run in a precision of their own until ``undo()``, or until the end of a ``with`` block."""

    def __init__(
        self,
        tags: ModuleTags[ModulePrecision | None],
        precisions: Mapping[Module, ModulePrecision | None],
        undone: Callable[[Override], None],
    ) -> None:
        self._tags = tags
        self._tagged = [(weakref.ref(module), tags.give(module, given)) for module, given in precisions.items()]
        self._undone = undone

    def undo(self) -> None:
        """Give every module back what it had, in whatever order overrides are undone. Calling it twice does no harm."""
        while self._tagged:
            reference, tag = self._tagged.pop()
            self._tags.take(tag, reference())
        self._undone(self)

    def modules(self) -> Iterator[Module]:
        """Yield the modules that are left of those that were given a precision."""
        for reference, _ in self._tagged:
            module = reference()
            if module is not None:
                yield module

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


class ModulePrecisions:
    """Which modules run in a precision of their own: by class from the list, by instance through `Override`."""

    def __init__(self, rules: Iterable[ModuleRule]) -> None:
        self._rules = tuple(rules)
        self._class_rules = tuple(
            rule for rule in self._rules if "." in rule.pattern and not _GLOB.intersection(rule.pattern)
        )
        self._by_class: weakref.WeakKeyDictionary[type, ModulePrecision | None] = weakref.WeakKeyDictionary()
        self._tags: ModuleTags[ModulePrecision | None] = ModuleTags()
        self._overrides: set[Override] = set()
        self.any = bool(self._class_rules)

    def of(self, module: Module) -> ModulePrecision | None:
        """Return the precision a module was given, None where it runs as the list says."""
        if TAGS in module.__dict__:
            tag = self._tags.find(module)
            if tag is not None:
                return self._tags.values[tag]
        return self._of_class(type(module)) if self._class_rules else None

    def override(self, module: Module, precision: str) -> Override:
        """Give one module, with all it calls, a precision."""
        return self._override({module: _precision(precision)})

    def override_paths(self, model: Module) -> Override:
        """Give the submodules of ``model`` what the list's path patterns say, the later pattern over the earlier."""
        names = dict(model.named_modules())
        chosen: dict[str, ModulePrecision | None] = {}
        for rule in self._rules:
            matched = fnmatch.filter(names, rule.pattern)
            chosen.update(dict.fromkeys(matched, _listed(rule)))
            if not matched and not self._names_a_class(rule, names.values()):
                near = difflib.get_close_matches(rule.pattern, names, n=3)
                warn_user(
                    f"{rule.origin}: {rule.pattern!r} matches no module of {type(model).__name__}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                )
        return self._override({names[name]: precision for name, precision in chosen.items()})

    def undo_all(self) -> None:
        """Undo every override that still stands."""
        for override in list(self._overrides):
            override.undo()

    def undo_within(self, modules: Container[Module]) -> None:
        """Undo the overrides that are about one of these modules."""
        for override in list(self._overrides):
            if any(module in modules for module in override.modules()):
                override.undo()

    def join(self, other: ModulePrecisions) -> None:
        """Let the overrides of another object be this one's too."""
        self._tags.join(other._tags)
        other._overrides |= self._overrides
        self._overrides, self.any = other._overrides, self.any or other.any

    def _override(self, precisions: Mapping[Module, ModulePrecision | None]) -> Override:
        override = Override(self._tags, precisions, self._undone)
        self._overrides.add(override)
        self.any = bool(self._class_rules or self._tags.values)
        return override

    def _undone(self, override: Override) -> None:
        self._overrides.discard(override)
        self.any = bool(self._class_rules or self._tags.values)

    def _names_a_class(self, rule: ModuleRule, modules: Iterable[Module]) -> bool:
        if rule not in self._class_rules:
            return False
        return any(_is_named(type(module), rule.pattern) for module in modules) or _class_at(rule.pattern) is not None

    def _of_class(self, cls: type) -> ModulePrecision | None:
        try:
            return self._by_class[cls]
        except KeyError:
            pass
        found = None
        for rule in self._class_rules:
            if _is_named(cls, rule.pattern):
                found = _listed(rule)
        self._by_class[cls] = found
        return found


def _listed(rule: ModuleRule) -> ModulePrecision | None:
    # In a list "none" takes an earlier entry away: the module runs as the rest of the list says.
    return None if rule.precision is ModulePrecision.NONE else rule.precision


def _precision(value: str) -> ModulePrecision:
    try:
        return ModulePrecision(value)
    except ValueError:
        raise UsageError(f"precision={value!r} is unknown; choose 'fp32', 'fp16' or 'none'") from None


def _class_at(dotted: str) -> type | None:
    try:
        found = resolve(dotted)
    except PatchError:
        return None
    return found[2] if found is not None and isinstance(found[2], type) else None


def _is_named(cls: type, dotted: str) -> bool:
    """Tell whether a class, or one it derives from, goes by a dotted name: its own, or one it is exported by."""
    exported = _class_at(dotted)
    return any(base is exported or f"{base.__module__}.{base.__qualname__}" == dotted for base in cls.__mro__)


def build_module_call(
    original: types.FunctionType,
    casts: Casts,
    precisions: ModulePrecisions,
    forward_dtypes: ModuleTags[ForwardDtypes],
) -> Any:
    """Build the replacement of ``torch.nn.Module.__call__``."""
    local, cache, dtypes_by_tag = casts.local, casts.cache, forward_dtypes.values
    compiling, trace = torch.compiler.is_dynamo_compiling, torch_private.tracing_state
    # Torch's own does no more than choose an implementation, which without hooks does no more than call forward().
    wrapped, implementation = vars(Module).get("_wrapped_call_impl"), torch_private.MODULE_CALL
    known = original is wrapped and original.__code__.co_names == _NAMES and skips_call_impl()
    direct, for_all = DirectCalls(), torch.nn.modules.module
    direct_calls, refresh = direct.by_class, direct.refresh

    def scoped(self: Module, *args: Any, **kwargs: Any) -> Any:
        if local.entries is not None or not cache.enabled:
            return original(self, *args, **kwargs)
        if self.__dict__.get("_modules"):
            # For the modules within, which are called directly. Once for all of them: it takes a microsecond.
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
        if dtypes_by_tag and TAGS in self.__dict__:
            tag = forward_dtypes.find(self)
            if tag is not None:
                return dtypes_by_tag[tag].around(model_call, casts, self, args, kwargs)
        if precisions.any and not local.forced_off:
            precision = precisions.of(self)
            if precision is not None:
                return in_precision(precision, self, args, kwargs)
        # Never None: reading it makes Dynamo guard on this handle, or code compiled for another would pass for ours.
        if compiling() and local.forced_off is not None:
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
        if cls in direct_calls and len(args) == 1 and not kwargs and type(args[0]) is Tensor and "forward" not in own:
            return direct_calls[cls](self, own, args[0])
        return self.forward(*args, **kwargs)

    return dress(call, original)


def _inputs(precision: ModulePrecision, casts: Casts, inputs: Any) -> Any:
    if precision is ModulePrecision.NONE:
        return inputs
    return _cast_nested(inputs, casts.to_fp32 if precision is ModulePrecision.FP32 else casts.to_half)


def _cast_nested(value: Any, cast: Callable[[Any], Any]) -> Any:
    return map_tensors(value, lambda tensor: cast(tensor) if tensor.layout in CASTABLE_LAYOUTS else tensor)


def build_recompute(original: Any, casts: Casts, position: int, *, calls_it: bool = False) -> Any:
    """Build the replacement of a function of `torch.utils.checkpoint` that takes another to call it again in backward.

    By then the module around it has returned, and with it the precision that it ran in; on CUDA the thread differs too.

    Args:
        original: A function or a staticmethod.
        casts: Whose switches that function is to find as they are now.
        position: Its place among the arguments.
        calls_it: Whether what is replaced makes the first call too, with the arguments that follow.
    """
    if isinstance(original, staticmethod):
        return staticmethod(build_recompute(original.__func__, casts, position, calls_it=calls_it))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        function = casts.remembered(args[position], args[position + 1 :] if calls_it else ())
        return original(*args[:position], function, *args[position + 1 :], **kwargs)

    return dress(replacement, original)


def build_function_context(original: Any, casts: Casts) -> Any:
    """Build the replacement of the constructor of a custom function's context: it notes how its thread casts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._autoamp_switches = casts, casts.switches()

    return dress(init, original, "torch.autograd.function", "BackwardCFunction.__init__")


def build_function_backward(original: Any, casts: Casts) -> Any:
    """Build the replacement of ``BackwardCFunction.apply``: a custom function's backward casts as its forward did.

    The thread may be another one, of autograd's own on CUDA, and the blocks around the forward have ended.
    """

    def apply(self: Any, *args: Any) -> Any:
        noted, switches = vars(self).get("_autoamp_switches", (None, None))
        if noted is not casts or switches == casts.switches() or not casts.is_open:
            return original(self, *args)
        token = casts.local.set(*switches)
        try:
            return original(self, *args)
        finally:
            casts.local.reset(token)

    return dress(apply, original)


def build_parallel_apply(original: Any, casts: Casts) -> Any:
    """Build the replacement of ``torch.nn.parallel.parallel_apply``: its threads cast as the one that calls it."""

    def parallel_apply(modules: Sequence[Module], *args: Any, **kwargs: Any) -> Any:
        return original([casts.remembered(module) for module in modules], *args, **kwargs)

    return dress(parallel_apply, original)
