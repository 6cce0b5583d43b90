"""The patches of one runtime: a table's targets, the module call and others, put in place together or not at all."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from autoamp import modules, ops, torch_private
from autoamp.errors import ListFileError, PatchError, warn_user
from autoamp.patching import CompilerTables, PatchSet, mark, name_by, original_of
from autoamp.rules import CastPolicy, CastRule
from autoamp.stepping import ClippingWatch, OptimizerSteps, scaled_params

__all__ = ["PatchedTorch"]

log = logging.getLogger(__name__)

# A thread that patches while another one restores would take its replacements for torch's own functions.
_one_at_a_time = threading.RLock()


class PatchedTorch:
    """Torch with the patches of a runtime in place, or without.

    Args:
        runtime: Whose casts, models, optimizers and diagnostics the patches serve.

    Attributes:
        in_place: Whether torch is patched.
        skipped_rules: Rules of shipped list sets on ops that this torch lacks.
        patches: What was replaced.
    """

    def __init__(self, runtime: Any) -> None:
        self.in_place = False
        self.skipped_rules: tuple[CastRule, ...] = ()
        self._runtime = runtime
        self.patches = PatchSet()
        self._compilers = CompilerTables()
        self._steps = OptimizerSteps(runtime.optimizers)
        self._registered: list[ops.Target] = []
        # The rules that patched nothing so far: their module is not imported, or has no such name.
        self._waiting: list[CastRule] = []
        # One replacement for each original, policy and in-place form, so that aliases stay the same object.
        self._built: dict[tuple[int, CastPolicy, int], tuple[ops.Target, Any]] = {}

    # -- putting patches in place, and taking them back --

    def patch(self, registered: Sequence[ops.Target]) -> None:
        """Put the patches in place. If one fails torch is left as it was."""
        run = self._runtime
        casts, settings = run.casts, run.settings
        expansion = ops.expand(settings.table)
        with _one_at_a_time:
            casts.open()
            try:
                with self.patches.all_or_nothing():
                    functions = self._patch_beside_lists()
                    # One target for each attribute, the last: a registration goes before the lists.
                    targets = {(id(one.parent), one.attribute): one for one in (*expansion.targets, *registered)}
                    self._patch_targets(targets.values(), functions)
                    for rule in expansion.deferred:
                        self._defer(rule)
                    self._compilers.teach_dynamo(self.patches, casts.local.bound_off, casts.local.bound_as_traced)
            except BaseException:
                casts.shut()
                self._take_back()
                raise
            self.in_place = True
        self._registered, self.skipped_rules = list(registered), expansion.skipped
        self._steps.start(self.patches)
        run.nonfinite.start()
        run.auto_scaling.resume()
        log.log(
            # A program that has not set up logging shows warnings alone.
            logging.WARNING if settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            settings.dtype, settings.device_type, len(expansion.targets), len(self.patches.late_bound),
            len(expansion.skipped),
        )  # fmt: skip

    def restore(self) -> tuple[str, ...]:
        """Take the patches back and return the names that others patched on top."""
        with _one_at_a_time:
            if not self.in_place:
                # Another thread has restored torch since.
                return ()
            self.in_place = False
            run = self._runtime
            run.auto_scaling.pause()
            run.casts.shut()
            self._steps.stop()
            run.nonfinite.stop()
            return self._take_back()

    def _take_back(self) -> tuple[str, ...]:
        foreign = self.patches.restore()
        self._compilers.forget()
        self._built.clear()
        self._waiting.clear()
        return foreign

    def patch_anew(self) -> None:
        """Take the patches back and put them in place again, as the state of the runtime asks for now."""
        if self.in_place:
            self.restore()
            self.patch(self._registered)

    def add(self, target: ops.Target) -> None:
        """Patch one more target, now and when torch is patched anew."""
        self._patch_more([target])
        self._registered.append(target)

    # -- the rules of the table, and registrations --

    def _patch_more(self, targets: Iterable[ops.Target]) -> None:
        with self.patches.all_or_nothing():
            self._patch_targets(targets, {})

    def _patch_targets(self, targets: Iterable[ops.Target], functions: dict[int, tuple[Any, Any]]) -> None:
        """Patch targets, and rebind the names by which other modules hold them or the given functions."""
        pairs = []
        for target in targets:
            if target.rule.policy is not CastPolicy.NONE:
                replacement = self._replacement(target)
                self.patches.replace(target.parent, target.attribute, replacement)
                pairs.append((target, replacement))
        if self._runtime.settings.rebind:
            wanted = {id(target.original): (target.original, replacement) for target, replacement in pairs}
            self.patches.rebind({**wanted, **functions}, ops.owns_its_names)
        for target, replacement in pairs:
            name_by(replacement, target.module, target.qualname)
        if any(target.parent is torch.Tensor for target, _ in pairs):
            torch_private.forget_compiled_code()

    def _replacement(self, target: ops.Target) -> Any:
        run, rule = self._runtime, target.rule
        key = (id(target.original), rule.policy, id(target.functional))
        if key not in self._built:
            if run.settings.casts_models and rule.origin.shipped:
                replacement = ops.build_for_half_models(target.original)
            else:
                replacement = ops.build_replacement(
                    target.original, rule.policy, run.casts,
                    module=target.module, qualname=target.qualname, functional=target.functional,
                    remedy=rule.remedy, allow_banned=run.settings.allow_banned,
                )  # fmt: skip
            if run.observation.observers:
                replacement = run.observation.watched(replacement, target)
            # With its target, which keeps the objects alive whose ids are in the key.
            self._built[key] = (target, mark(replacement, target.original))
            self._compilers.add(target.original, replacement)
        return self._built[key][1]

    def _defer(self, rule: CastRule) -> None:
        """Patch a target once its module is imported: any of the packages on the way may be the one."""
        self._waiting.append(rule)

        def imported(_: types.ModuleType) -> None:
            if rule not in self._waiting:
                return
            try:
                found = ops.locate(rule)
                if found is not None:
                    self._waiting.remove(rule)
                    self._patch_more(found)
            except (ListFileError, PatchError) as error:
                # The import of somebody's package must not fail for a typo in a list.
                warn_user(f"a rule has no effect: {error}")

        parts = rule.target.split(".")
        for end in range(1, len(parts)):
            self.patches.when_imported(".".join(parts[:end]), imported)

    # -- what is on no list --

    def _patch_beside_lists(self) -> dict[int, tuple[Any, Any]]:
        """Patch what is on no list. Returns the functions of modules among it, which programs may hold by name."""
        functions: dict[int, tuple[Any, Any]] = {}
        for owner, name, builder in self._builders():
            if owner is None or name is None:
                # This torch has no such thing; `torch_private` says what goes without.
                continue
            original = original_of(inspect.getattr_static(owner, name))
            replacement = builder(original)
            self.patches.replace(owner, name, replacement)
            if isinstance(owner, types.ModuleType):
                self._compilers.add(original, replacement)
                functions[id(original)] = (original, replacement)
        return functions

    def _builders(self) -> list[tuple[Any, str | None, Callable[[Any], Any]]]:
        """Return owners, attributes, and what builds each replacement."""
        run, checkpoint = self._runtime, torch.utils.checkpoint
        casts, context = run.casts, torch_private.CUSTOM_FUNCTION_CONTEXT
        # The function `parallel_apply` hides the second and third of these modules as attributes.
        parallel = ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply")
        regions = ops.AutocastRegions(casts)
        clipping = ClippingWatch(lambda: scaled_params(run.optimizers), run.optimizers.refuse_clipping)
        return [
            (torch.autocast, "__enter__", regions.build_enter),
            (torch.autocast, "__exit__", regions.build_exit),
            (torch.backends.mha, "get_fastpath_enabled", lambda f: ops.build_fast_path_check(f, casts)),
            (torch.nn.RNNBase, torch_private.CHECK_INPUT, lambda original: ops.build_check_input(original, casts)),
            (checkpoint, torch_private.RECOMPUTATION, lambda f: modules.build_recompute(f, casts, 0)),
            (checkpoint.CheckpointFunction, "forward", lambda f: modules.build_recompute(f, casts, 1)),
            (context, "__init__", lambda original: modules.build_function_context(original, casts)),
            (context, "apply", lambda original: modules.build_function_backward(original, casts)),
            (torch.nn.utils, "clip_grad_norm_", clipping.around),
            (torch.nn.utils, "clip_grad_value_", clipping.around),
            (torch.nn.Module, "__call__", self._module_call),
            # What `torch.fx` calls modules by, torch.export too.
            (sys.modules.get("torch.fx._symbolic_trace"), "_orig_module_call", self._module_call),
            *(
                (sys.modules[name], "parallel_apply", lambda f: modules.build_parallel_apply(f, casts))
                for name in parallel
            ),
            *((torch.nn.Module, name, builder) for name, builder in run.models.builders()),
            *run.overflows.recorder.builders(),
            *run.nonfinite.own_scaler.builders(),
            *casts.builders(),
            *ops.builders_for_half_models(casts),
            *ops.builders_for_scripts(casts),
        ]

    def _module_call(self, original: Any) -> Any:
        run = self._runtime
        forward_dtypes, recorder = run.models.forward_dtypes, run.overflows.recorder
        call = modules.build_module_call(original, run.casts, run.precisions, forward_dtypes, recorder)
        return run.observation.watched_modules(call) if run.observation.observers else call

    # -- what the rules do --

    def rule_on(self, original: Any) -> CastRule | None:
        """Return the rule by which a function was replaced; None for any other object."""
        return next((target.rule for target, _ in self._built.values() if target.original is original), None)

    def unmatched_rules(self) -> dict[str, str]:
        """Return what of the user's lists has had no effect so far, by name, each with a message for the user."""
        rules = [rule for rule in self._waiting if not rule.origin.shipped]
        unmet = {rule.target: f"{rule.target!r} ({rule.origin}) names nothing that was imported" for rule in rules}
        return {**unmet, **self._runtime.precisions.unmatched()}
