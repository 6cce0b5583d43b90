"""Installing: a table's targets, the recurrent layers and the module call, patched together or not at all."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from autoamp import torch_private
from autoamp.casting import Casts
from autoamp.diagnostics import Observation
from autoamp.errors import ListFileError, PatchError, warn_user
from autoamp.modules import build_function_backward, build_function_context, build_parallel_apply, build_recompute
from autoamp.ops import (
    AutocastRegions,
    Expansion,
    Target,
    build_check_input,
    build_replacement,
    builders_for_half_models,
    locate,
    owns_its_names,
)
from autoamp.patching import PatchSet, mark, name_by, original_of
from autoamp.rules import CastPolicy, CastRule
from autoamp.runtime.settings import Settings

__all__ = ["Installation"]

_NOTHING: Mapping[int, tuple[Any, Any]] = {}

# What of Dynamo copies names of torch as it is imported. It knows ops by identity; and of a `Module.__call__` that it
# takes for torch's own it calls `forward` alone, which leaves casts by module out.
_TAKES_FROM_TORCH = ("torch._dynamo.utils", "torch._dynamo.variables.tensor", "torch._dynamo.variables.torch")

# A handle that comes while another goes, in another thread, would take its replacements for torch's own functions.
_one_at_a_time = threading.RLock()


class Installation:
    """The patches of one handle.

    Args:
        casts: What replacements cast by.
        settings: Those of the handle.
        observation: Its observers, who are told of calls.
        builders: What is patched besides the rules and casts: owners, attributes, and what builds each replacement.

    Attributes:
        patches: All patches, restored together; others may be added while they are in place.
        waiting: The rules that patched nothing so far, as their module was not imported or has no such name.
    """

    def __init__(
        self,
        casts: Casts,
        settings: Settings,
        observation: Observation,
        builders: Sequence[tuple[Any, str, Callable[[Any], Any]]],
    ) -> None:
        self._casts = casts
        self._settings = settings
        self._observation = observation
        self._builders = builders
        self.patches = PatchSet()
        # One replacement for each original, policy and in-place form, so that aliases stay the same object.
        self._built: dict[tuple[int, CastPolicy, int], tuple[Target, Any]] = {}
        self._scripted: list[int] = []
        self.waiting: list[CastRule] = []

    def install(self, expansion: Expansion, registered: tuple[Target, ...]) -> None:
        """Patch everything. Where one patch fails all are taken back, and the error goes on."""
        with _one_at_a_time:
            try:
                with self.patches.all_or_nothing():
                    beside = self._patch_beside_lists()
                    self._patch(_by_place(*expansion.targets, *registered), beside)
                    for rule in expansion.deferred:
                        self._defer(rule)
                    self._teach_dynamo()
            except BaseException:
                self.remove()
                raise

    def add(self, target: Target) -> None:
        """Patch one more target."""
        with self.patches.all_or_nothing():
            self._patch([target])

    def remove(self) -> tuple[str, ...]:
        """Restore everything and return the names that others patched on top."""
        with _one_at_a_time:
            foreign = self.patches.restore()
            _, table_of_builtins = torch_private.names_of_builtins
            table = table_of_builtins()
            for key in self._scripted:
                table.pop(key, None)
            self._scripted.clear()
            self._built.clear()
            _forget_tables_of_torch()
            return foreign

    def _patch(self, targets: Iterable[Target], beside: Mapping[int, tuple[Any, Any]] = _NOTHING) -> None:
        pairs = []
        for target in targets:
            if target.rule.policy is not CastPolicy.NONE:
                replacement = self._replacement(target)
                self.patches.replace(target.parent, target.attribute, replacement)
                pairs.append((target, replacement))
        if self._settings.rebind:
            wanted = {id(target.original): (target.original, replacement) for target, replacement in pairs}
            self.patches.rebind({**wanted, **beside}, owns_its_names)
        for target, replacement in pairs:
            name_by(replacement, target.module, target.qualname)

    def _replacement(self, target: Target) -> Any:
        rule = target.rule
        key = (id(target.original), rule.policy, id(target.functional))
        if key not in self._built:
            replacement = build_replacement(
                target.original, rule.policy, self._casts,
                module=target.module, qualname=target.qualname, functional=target.functional,
                remedy=rule.remedy, allow_banned=self._settings.allow_banned,
            )  # fmt: skip
            if self._observation.observers:
                replacement = self._observation.watched(replacement, target)
            # With its target, which keeps the objects alive whose ids are in the key.
            self._built[key] = (target, mark(replacement, target.original))
            self._let_torchscript_know(target.original, replacement)
        return self._built[key][1]

    def _patch_beside_lists(self) -> dict[int, tuple[Any, Any]]:
        """Patch what is on no list. Returns the functions of modules among it, which programs may hold by name."""
        casts, checkpoint = self._casts, torch.utils.checkpoint
        regions = AutocastRegions(casts)
        context = torch_private.CUSTOM_FUNCTION_CONTEXT
        builders: list[tuple[Any, str | None, Callable[[Any], Any]]] = [
            (torch.autocast, "__enter__", regions.build_enter),
            (torch.autocast, "__exit__", regions.build_exit),
            (torch.nn.RNNBase, torch_private.CHECK_INPUT, lambda original: build_check_input(original, casts)),
            (checkpoint, torch_private.RECOMPUTATION, lambda f: build_recompute(f, casts, 0)),
            (checkpoint.CheckpointFunction, "forward", lambda f: build_recompute(f, casts, 1)),
            (context, "__init__", lambda original: build_function_context(original, casts)),
            (context, "apply", lambda original: build_function_backward(original, casts)),
            *self._builders,
            *casts.builders(),
            *builders_for_half_models(casts),
        ]
        functions: dict[int, tuple[Any, Any]] = {}
        for owner, name, builder in builders:
            if owner is None or name is None:
                # This torch has no such thing; `torch_private` says what goes without.
                continue
            original = original_of(inspect.getattr_static(owner, name))
            replacement = builder(original)
            self.patches.replace(owner, name, replacement)
            if isinstance(owner, types.ModuleType):
                self._let_torchscript_know(original, replacement)
                functions[id(original)] = (original, replacement)
        # A function that lies in three modules of torch, two of which it hides by its name.
        original = original_of(torch.nn.parallel.parallel_apply)
        replacement = build_parallel_apply(original, casts)
        for module_name in ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply"):
            self.patches.replace(sys.modules[module_name], "parallel_apply", replacement)
        return functions

    def _let_torchscript_know(self, original: Any, replacement: Any) -> None:
        # The compiler of torch.jit.script cannot compile a variadic closure. It knows builtins, and functions that are
        # two in one, by identity; of others it asks what to compile in their place.
        find, table_of_builtins = torch_private.names_of_builtins
        name = find(original)
        if name is not None:
            table_of_builtins()[id(replacement)] = name
            self._scripted.append(id(replacement))
        elif isinstance(original, types.FunctionType):
            replacement.__prepare_scriptable__ = lambda: original
            if original in torch_private.two_in_one:
                torch_private.two_in_one[replacement] = torch_private.two_in_one[original]

    def _teach_dynamo(self) -> None:
        """Let what Dynamo takes from torch's namespace be the originals, whenever it is imported."""
        for module_name in _TAKES_FROM_TORCH:
            self.patches.when_imported(module_name, _put_originals)
        trace_rules = sys.modules.get("torch._dynamo.trace_rules")
        if trace_rules is None:
            self.patches.when_imported("torch._dynamo.trace_rules", self._load_originals)
        else:
            self._load_originals(trace_rules)

    def _load_originals(self, trace_rules: Any) -> None:
        load_object = trace_rules.load_object
        self.patches.replace(trace_rules, "load_object", lambda name: original_of(load_object(name)))

    def _defer(self, rule: CastRule) -> None:
        """Patch a target once its module is imported: any of the packages on the way may be the one."""
        waiting = [rule]
        self.waiting.append(rule)

        def imported(_: types.ModuleType) -> None:
            if not waiting:
                return
            try:
                found = locate(rule)
                if found is None:
                    return
                waiting.clear()
                for target in found:
                    self.add(target)
                self.waiting.remove(rule)
            except (ListFileError, PatchError) as error:
                # The import of somebody's package must not fail for a typo in a list.
                waiting.clear()
                warn_user(f"a rule has no effect: {error}")

        parts = rule.target.split(".")
        for end in range(1, len(parts)):
            self.patches.when_imported(".".join(parts[:end]), imported)


def _by_place(*targets: Target) -> list[Target]:
    """Return one target for each attribute, the last: a registration goes before the lists."""
    return list({(id(target.parent), target.attribute): target for target in targets}.values())


def _put_originals(module: types.ModuleType) -> None:
    """Put the originals into the names and tables that a module has just made of patched names."""
    for name, value in list(vars(module).items()):
        restored: Any
        if type(value) is dict and not name.startswith("__"):
            restored = {original_of(key): original_of(item) for key, item in value.items()}
        elif type(value) is frozenset:
            restored = frozenset(map(original_of, value))
        else:
            restored = original_of(value)
        if restored is not value and restored != value:
            setattr(module, name, restored)


def _forget_tables_of_torch() -> None:
    """Drop what torch and Dynamo looked up in torch's namespace while it was patched; they look it up anew."""
    for module_name in ("torch.overrides", "torch._dynamo.trace_rules", "torch._dynamo.variables.torch"):
        for value in list(vars(sys.modules.get(module_name, types.ModuleType(""))).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
