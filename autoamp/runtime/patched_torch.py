"""The patches of one handle: a table's targets, the module call and others, put in place together or not at all."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoamp import ops, torch_private
from autoamp.errors import ListFileError, PatchError, warn_user
from autoamp.patching import CompilerTables, PatchSet, mark, name_by, writing
from autoamp.program import Subscriber
from autoamp.rules import CastPolicy, CastRule
from autoamp.runtime.settings import Settings
from autoamp.stepping import GuardedOptimizers

log = logging.getLogger(__name__)


class PatchedTorch:
    """Torch with the patches of a runtime in place, or without.

    Args:
        optimizers: Have the casts that the replacements make, and the events of the program.

    Attributes:
        in_place: Whether torch is patched.
        skipped_rules: Rules of shipped list sets on ops that this torch lacks.
        patches: What was replaced.
    """

    _settings: Settings

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self.in_place = False
        self.skipped_rules: tuple[CastRule, ...] = ()
        self._optimizers = optimizers
        self.patches = PatchSet()
        self._compilers = CompilerTables()
        self._registered: list[ops.Target] = []
        # The rules that patched nothing so far: their module is not imported, or has no such name.
        self._waiting: list[CastRule] = []
        # One replacement for each original, policy and in-place form, so that aliases stay the same object.
        self._built: dict[tuple[int, CastPolicy, int], tuple[ops.Target, Any]] = {}

    # -- putting patches in place, and taking them back --

    def patch(self, settings: Settings, registered: Sequence[ops.Target]) -> None:
        """Put the patches in place. If one fails torch is left as it was.

        Args:
            settings: Those of the handle: its lists, and how they are applied.
            registered: The registrations, which take precedence over the lists.
        """
        casts, program = self._optimizers.casts, self._optimizers.program
        self._settings = settings
        expansion = ops.expand(settings.table)
        # A thread that patches while another one restores would take its replacements for torch's own functions.
        with writing:
            casts.open()
            try:
                with self.patches.all_or_nothing():
                    # Half models cast by themselves, as programs with half models do.
                    asked = () if settings.casts_models else ops.autocast_functions(casts)
                    functions = program.patch(self.patches, (*ops.unlisted_functions(casts), *asked))
                    for original, replacement in functions.values():
                        self._compilers.add(original, replacement)
                    # One target for each attribute, the last: a registration goes before the lists.
                    targets = {(id(one.parent), one.attribute): one for one in (*expansion.targets, *registered)}
                    self._patch_targets(targets.values(), functions)
                    for rule in expansion.deferred:
                        self._defer(rule)
                    local = casts.local
                    self._compilers.teach_dynamo(
                        self.patches,
                        lambda function: local.with_mode(function, False, forced_off=True),
                        lambda function: local.with_mode(function, local.traced.on, local.traced.forced_off),
                    )
            except BaseException:
                casts.shut()
                self._take_back()
                raise
            self.in_place = True
        self._registered, self.skipped_rules = list(registered), expansion.skipped
        program.tell(Subscriber.started)
        log.log(
            # A program that has not set up logging shows warnings alone.
            logging.WARNING if settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            settings.dtype, settings.device_type, len(expansion.targets), len(self.patches.late_bound),
            len(expansion.skipped),
        )  # fmt: skip

    def restore(self) -> tuple[str, ...]:
        """Take the patches back and return the names that others patched on top."""
        with writing:
            if not self.in_place:
                # Another thread has restored torch since.
                return ()
            self.in_place = False
            self._optimizers.casts.shut()
            self._optimizers.program.tell(Subscriber.stopped)
            return self._take_back()

    def _take_back(self) -> tuple[str, ...]:
        self._optimizers.program.restore()
        foreign = self.patches.restore()
        self._compilers.forget()
        self._built.clear()
        self._waiting.clear()
        return foreign

    def patch_anew(self) -> None:
        """Take the patches back and put them in place again, for other observers."""
        if self.in_place:
            self.restore()
            self.patch(self._settings, self._registered)

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
        if self._settings.rebind:
            wanted = {id(target.original): (target.original, replacement) for target, replacement in pairs}
            self.patches.rebind({**wanted, **functions}, ops.owns_its_names)
        for target, replacement in pairs:
            name_by(replacement, target.module, target.qualname)
        if any(target.parent is torch.Tensor for target, _ in pairs):
            torch_private.forget_compiled_code()

    def _replacement(self, target: ops.Target) -> Any:
        rule, settings = target.rule, self._settings
        key = (id(target.original), rule.policy, id(target.functional))
        if key not in self._built:
            if settings.casts_models and rule.origin.shipped:
                replacement = ops.build_for_half_models(target.original)
            else:
                replacement = ops.build_replacement(
                    target.original, rule.policy, self._optimizers.casts,
                    module=target.module, qualname=target.qualname, functional=target.functional,
                    remedy=rule.remedy, allow_banned=settings.allow_banned,
                )  # fmt: skip
            for layer in self._optimizers.listeners.op_layer:
                replacement = layer(replacement, target)
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

    # -- what the rules do --

    def rule_on(self, original: Any) -> CastRule | None:
        """Return the rule by which a function was replaced; None for any other object."""
        return next((target.rule for target, _ in self._built.values() if target.original is original), None)

    def unmatched_rules(self) -> dict[str, str]:
        """Return the ops of the user's lists that were not patched so far, each with a message for the user."""
        rules = [rule for rule in self._waiting if not rule.origin.shipped]
        return {rule.target: f"{rule.target!r} ({rule.origin}) names nothing that was imported" for rule in rules}
