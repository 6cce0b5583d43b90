"""Where torch is patched beside the lists, and who is told there: one table.

A site is patched only if a part that it tells listens. Torch's own objects are put back as they were.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from autoamp import torch_private
from autoamp.core.patches import PatchSet, imitate, original_of, writing

if TYPE_CHECKING:
    from autoamp.core.auto_scale import AutoScale, OptimizerSteps
    from autoamp.core.half_models import CastModels
    from autoamp.core.nonfinite import NonFiniteSteps
    from autoamp.core.scope import AutocastRegions, ModuleCalls

LATE_MODULES = (
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.checkpoint.state_dict",
    "torch.export",
    "torch.onnx",
    "torch.nn.attention.bias",
)
"""The modules with sites that torch may not import itself."""

Told = Sequence[Callable[..., Any]]
"""The methods of parts that are called at a site, in their order: of wrappers the first is outermost."""


Place = tuple[Any, str, Callable[[Any], Any]]
"""A module, class or object, the attribute that is replaced, and what builds the replacement from the original."""


@dataclass
class Parts:
    """The parts of a handle that stand where torch is patched beside the lists.

    Attributes:
        calls: Around calls of modules, and what runs later or in another thread.
        models: Around state dicts of half models.
        regions: In regions of torch.autocast.
        steps: Around backward passes and steps of optimizers.
        auto_scaling: Where the program makes optimizers, scalers and hooks that scaled passes have to know.
        nonfinite: Around losses and steps that no loss scale checks.
    """

    calls: ModuleCalls
    models: CastModels
    regions: AutocastRegions
    steps: OptimizerSteps
    auto_scaling: AutoScale
    nonfinite: NonFiniteSteps


@dataclass(frozen=True, slots=True)
class PatchSite:
    """An attribute of torch that is patched beside the lists.

    Attributes:
        parent: The module or class; None where this torch has none.
        name: The attribute; None where this torch has none.
        told: The methods of parts.
        build: Makes the replacement, from the original and these methods.
    """

    parent: Any
    name: str | None
    told: Told
    build: Callable[..., Any]


def sites(parts: Parts, class_made: Callable[[Any], object]) -> Iterator[PatchSite]:
    """Yield every site of the modules that are imported, with who is told there.

    Args:
        parts: The parts.
        class_made: Is told first of a new optimizer, which may be of a new class.
    """
    calls, models, auto_scaling, nonfinite = parts.calls, parts.models, parts.auto_scaling, parts.nonfinite
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    yield PatchSite(Module, "__call__", [calls.around_module_call], _around)
    # By this `torch.fx` calls modules, torch.export too.
    traced = sys.modules.get("torch.fx._symbolic_trace")
    yield PatchSite(traced, "_orig_module_call", [calls.around_module_call], _around)
    yield PatchSite(torch_private.compiled_model_class(), "__call__", [calls.around_compiled_call], _around)
    yield PatchSite(Module, "state_dict", [models.around_state_dict], _around)
    yield PatchSite(Module, "load_state_dict", [models.around_load_state_dict], _around)
    yield PatchSite(torch.optim.swa_utils.AveragedModel, "__init__", [models.average_made], _after)
    exporters: list[tuple[Any, str]] = [(torch.jit, "trace"), (torch.jit, "trace_module")]
    exporters += [(sys.modules.get(name), "export") for name in ("torch.export", "torch.onnx")]
    for parent, name in exporters:
        yield PatchSite(parent, name, [calls.around_export, models.around_export], _around)
    checkpoint, later = torch.utils.checkpoint, [calls.runs_later]
    yield PatchSite(checkpoint, torch_private.RECOMPUTATION, later, functools.partial(_later, place=0))
    yield PatchSite(checkpoint.CheckpointFunction, "forward", later, functools.partial(_later, place=1))
    # The function `parallel_apply` hides the second and third of these modules as attributes.
    for name in ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply"):
        yield PatchSite(sys.modules[name], "parallel_apply", later, _all_later)
    yield PatchSite(autocast, "__enter__", [parts.regions.autocast_entered, auto_scaling.autocast_entered], _after)
    yield PatchSite(autocast, "__exit__", [parts.regions.autocast_left], _before_exit)
    yield PatchSite(torch.autograd, "backward", [parts.steps.around_backward], _around)
    context = torch_private.CUSTOM_FUNCTION_CONTEXT
    yield PatchSite(context, "__init__", [calls.function_called], _after)
    yield PatchSite(context, "apply", [calls.around_function_backward], _around)
    yield PatchSite(Tensor, "retain_grad", [auto_scaling.grad_retained], _after)
    registered = [auto_scaling.hook_registered]
    yield PatchSite(Tensor, "register_hook", registered, _hook_of)
    accumulated = functools.partial(_hook_of, accumulated=True)
    yield PatchSite(Tensor, "register_post_accumulate_grad_hook", registered, accumulated)
    for name in ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        yield PatchSite(Module, name, registered, _hook_of)
    for name in ("register_module_full_backward_hook", "register_module_full_backward_pre_hook"):
        yield PatchSite(torch.nn.modules.module, name, registered, _hook_of_all)
    for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_"):
        yield PatchSite(torch.nn.utils, name, [parts.steps.clips_gradients], _before_clipping)
    for name in ("__init__", "__setstate__"):
        yield PatchSite(Optimizer, name, [class_made, parts.steps.optimizer_made, auto_scaling.optimizer_made], _after)
    yield PatchSite(scaler, "__init__", [auto_scaling.scaler_made], _after)
    sharded = getattr(sys.modules.get(LATE_MODULES[0]), "ShardedGradScaler", None)
    for kind in (scaler, sharded):
        yield PatchSite(kind, "scale", [auto_scaling.loss_scaled, nonfinite.loss_scaled], _after_scale)
    dcp = sys.modules.get(LATE_MODULES[1])
    made = torch_private.STATE_MADE if hasattr(dcp, torch_private.STATE_MADE) else None
    yield PatchSite(dcp, made, [parts.steps.around_state_made], _around)
    mask = getattr(sys.modules.get(LATE_MODULES[-1]), "CausalBias", None)
    yield PatchSite(mask, "__torch_function__", [calls.around_causal_bias], _around)
    yield PatchSite(scaler, "unscale_", [nonfinite.around_unscale], _around)
    yield PatchSite(scaler, "step", [nonfinite.around_scaler_step], _around)


# -- replacements --


def _around(original: Any, told: Told) -> Any:
    for around in reversed(told):
        original = around(original)
    return original


def _after(original: Any, told: Told) -> Any:
    def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self_, *args, **kwargs)
        for tell in told:
            tell(self_)
        return result

    return replacement


def _after_scale(original: Any, told: Told) -> Any:
    def scale(self_: Any, outputs: Any) -> Any:
        scaled = original(self_, outputs)
        for tell in told:
            tell(self_, outputs)
        return scaled

    return scale


def _before_exit(original: Any, told: Told) -> Any:
    def leave(self_: Any, *exc_info: Any) -> Any:
        for tell in told:
            tell(self_, exc_info[1])
        return original(self_, *exc_info)

    return leave


def _before_clipping(original: Any, told: Told) -> Any:
    first = next(iter(inspect.signature(original).parameters))

    def clip(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (args or first in kwargs):
            tensors = args[0] if args else kwargs.pop(first)
            # A generator can be gone through once.
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for tell in told:
                tell(original.__name__.lstrip("_"), tensors)
            args = (tensors, *args[1:])
        return original(*args, **kwargs)

    return clip


def _later(original: Any, told: Told, *, place: int) -> Any:
    """Build the replacement of a function, or a staticmethod, that gets another one as its argument of this place."""
    if isinstance(original, staticmethod):
        return staticmethod(_later(original.__func__, told, place=place))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:place], _each(told, args[place]), *args[place + 1 :], **kwargs)

    return replacement


def _all_later(original: Any, told: Told) -> Any:
    def parallel_apply(modules: Sequence[Module], *args: Any, **kwargs: Any) -> Any:
        return original([_each(told, module) for module in modules], *args, **kwargs)

    return parallel_apply


def _hook_of(original: Any, told: Told, *, accumulated: bool = False) -> Any:
    def register(self_: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = self_ if isinstance(self_, Tensor) else None
        return original(self_, _each(told, hook, tensor, accumulated=accumulated), *args, **kwargs)

    return register


def _hook_of_all(original: Any, told: Told) -> Any:
    def register(hook: Any) -> Any:
        return original(_each(told, hook, None, accumulated=False))

    return register


def _each(told: Told, function: Any, *args: Any, **kwargs: Any) -> Any:
    for tell in told:
        function = tell(function, *args, **kwargs)
    return function


# -- steps of optimizers --


def _cells_of_wrapped(step: Any) -> Iterator[Any]:
    """Yield the closure cell in which torch's wrapper of a step has the step itself, unless that is replaced."""
    while getattr(getattr(step, "__wrapped__", None), "hooked", False):
        # Somebody else's wrapper around torch's.
        step = step.__wrapped__
    for cell in getattr(step, "__closure__", None) or ():
        if cell.cell_contents is getattr(step, "__wrapped__", cell):
            yield cell


def _subclasses(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _subclasses(derived)


# -- the sites of a handle --


class PatchSites:
    """The sites of one handle, patched from `patch` to `restore`.

    Torch wraps the ``step`` of each class of optimizers to run hooks. The wrapper is replaced in the class. A wrapper
    that was bound before that, as by an LR scheduler, is met as well: the function that it calls is replaced in its
    closure.

    Attributes:
        parts: The parts that are told; None for none. Not to be set while torch is patched.
    """

    def __init__(self) -> None:
        self.parts: Parts | None = None
        # What `patch` was given, None where torch is not patched; and the patches of the sites that `update` patched.
        self._patches: PatchSet | None = None
        self._later = PatchSet()
        # Where `patch` has patched.
        self._patched: set[tuple[int, str]] = set()
        # The classes whose step is replaced, and the cells of torch's wrappers with their contents before.
        self._stepped: list[type] = []
        self._cells: list[tuple[Any, Any]] = []

    def patch(self, patches: PatchSet, functions: Iterable[Place]) -> dict[int, tuple[Any, Any]]:
        """Patch torch for all parts that listen.

        Args:
            patches: Take the replacements, and are restored after `restore`.
            functions: What else to replace.

        Returns:
            ``id(original) -> (original, replacement)`` of the functions of modules, which programs may hold by name.
        """
        replaced: dict[int, tuple[Any, Any]] = {}
        self._patches = patches
        for cls in _subclasses(Optimizer):
            self._reach(cls)
        for parent, name, build in (*self._sites(), *functions):
            self._patched.add((id(parent), name))
            replaced |= _replace(parent, name, build, patches)
        for module in LATE_MODULES:
            patches.when_imported(module, lambda _: self.update())
        if self.parts is not None and self.parts.auto_scaling.active:
            self.parts.auto_scaling.guard_all()
        return replaced

    def update(self) -> None:
        """Patch torch for parts that began to listen, and restore what only those needed that stopped."""
        with writing:
            self._later.restore()
            if self._patches is not None:
                with self._later.all_or_nothing():
                    for parent, name, build in self._sites():
                        if (id(parent), name) not in self._patched:
                            _replace(parent, name, build, self._later)

    def restore(self) -> None:
        """Restore what is not in the patches that `patch` was given. Waits for the flags of steps that were not read.

        What is told of steps may be a warning, which a filter makes an error.
        """
        # Another thread may be within `update`.
        with writing:
            was_patched, self._patches = self._patches is not None, None
            self._patched.clear()
            self._stepped.clear()
            while self._cells:
                cell, original = self._cells.pop()
                cell.cell_contents = original
            self._later.restore()
            if was_patched and self.parts is not None:
                self.parts.nonfinite.catch_up()

    def _sites(self) -> Iterator[Place]:
        """Yield the sites that this torch has and at which a part listens; `torch_private` says what goes without.

        All parts of a site are told there, also those that begin to listen later: programs keep replacements by name.
        """
        for site in () if self.parts is None else sites(self.parts, lambda optimizer: self._reach(type(optimizer))):
            # Parts that only listen at times say so.
            is_heard = any(getattr(getattr(tell, "__self__", None), "active", True) for tell in site.told)
            if site.parent is not None and site.name is not None and is_heard:
                yield site.parent, site.name, functools.partial(site.build, told=site.told)

    def _reach(self, cls: type) -> None:
        """Replace the steps of a class and of those that it derives from, as far as torch has put its hooks there."""
        if self._patches is None or self.parts is None:
            return
        told = [self.parts.steps.around_step]
        for base in cls.__mro__:
            step = vars(base).get("step")
            if getattr(step, "hooked", False) and base not in self._stepped:
                original = original_of(step)
                replacement = _around(original, told)
                if replacement is original:
                    continue
                self._patches.replace(base, "step", imitate(replacement, original))
                self._stepped.append(base)
                for cell in _cells_of_wrapped(original):
                    self._cells.append((cell, cell.cell_contents))
                    cell.cell_contents = _around(cell.cell_contents, told)


def _replace(parent: Any, name: str, build: Callable[[Any], Any], patches: PatchSet) -> dict[int, tuple[Any, Any]]:
    """Replace an attribute by what is built of it. Returns ``id(original) -> both``; nothing for a method."""
    # Some are inherited: Tensor has them from its base.
    original = original_of(inspect.getattr_static(parent, name))
    replacement = build(original)
    if replacement is original:
        return {}
    is_module = isinstance(parent, types.ModuleType)
    if original_of(replacement) is replacement and not isinstance(replacement, (staticmethod, classmethod)):
        module, qualname = (parent.__name__, name) if is_module else (parent.__module__, f"{parent.__name__}.{name}")
        imitate(replacement, original, module, qualname)
    patches.replace(parent, name, replacement)
    return {id(original): (original, replacement)} if is_module else {}
