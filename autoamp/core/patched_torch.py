"""The patches of one handle: a table's targets, the module call and others, put in place together or not at all."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoamp import torch_private
from autoamp.core.autocast_state import autocast_functions
from autoamp.core.compilers import CompilerTables
from autoamp.core.guarded_optimizers import GuardedOptimizers
from autoamp.core.patches import PatchSet, mark, name_by, writing
from autoamp.core.policies import build_replacement
from autoamp.core.rules import CastPolicy, CastRule, CastTable
from autoamp.core.settings import Settings
from autoamp.core.targets import Target, expand, locate, owns_its_names
from autoamp.core.threads import HALF_MODEL
from autoamp.core.unlisted import unlisted_functions
from autoamp.errors import ListFileError, PatchError, warn_user

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
        self._registered: list[Target] = []
        # The rules that patched nothing so far: their module is not imported, or has no such name.
        self._waiting: list[tuple[CastRule, bool]] = []
        # By their places, the targets of the handle's own rules, and of those inside half models.
        self._targets: dict[bool, dict[tuple[int, str], Target]] = {False: {}, True: {}}
        # One replacement for each original, policy and in-place form, so that aliases stay the same object.
        # The target by which a replacement of a builtin was named.
        self._named: dict[int, Target] = {}
        self._built: dict[tuple[Any, ...], tuple[Target, Any]] = {}

    # -- putting patches in place, and taking them back --

    def patch(self, settings: Settings, registered: Sequence[Target]) -> None:
        """Put the patches in place. If one fails torch is left as it was.

        Args:
            settings: Those of the handle: its lists, and how they are applied.
            registered: The registrations, which take precedence over the lists.
        """
        casts, sites = self._optimizers.casts, self._optimizers.sites
        self._settings = settings
        expansion = expand(settings.table)
        within = expand(settings.half_table or CastTable())
        # A thread that patches while another one restores would take its replacements for torch's own functions.
        with writing:
            casts.open()
            try:
                with self.patches.all_or_nothing():
                    # Half models cast by themselves, as programs with half models do.
                    asked = () if settings.half_table is not None else autocast_functions(casts)
                    functions = sites.patch(self.patches, (*unlisted_functions(casts), *asked))
                    for original, replacement in functions.values():
                        self._compilers.add(original, replacement)
                    # Of several targets for one attribute the last: a registration goes before the lists.
                    self._patch_targets((*expansion.targets, *registered), within.targets, functions)
                    for of_half_models, found in enumerate((expansion, within)):
                        for rule in found.deferred:
                            self._defer(rule, bool(of_half_models))
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
        self._registered = list(registered)
        self.skipped_rules = tuple(dict.fromkeys((*expansion.skipped, *within.skipped)))
        sites.started()
        log.log(
            # A program that has not set up logging shows warnings alone.
            logging.WARNING if settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            settings.dtype, settings.device_type, len(expansion.targets) + len(within.targets),
            len(self.patches.late_bound), len(self.skipped_rules),
        )  # fmt: skip

    def restore(self) -> tuple[str, ...]:
        """Take the patches back and return the names that others patched on top."""
        with writing:
            if not self.in_place:
                # Another thread has restored torch since.
                return ()
            self.in_place = False
            self._optimizers.casts.shut()
            self._optimizers.sites.stopped()
            return self._take_back()

    def _take_back(self) -> tuple[str, ...]:
        self._optimizers.sites.restore()
        foreign = self.patches.restore()
        self._compilers.forget()
        self._built.clear()
        self._named.clear()
        self._waiting.clear()
        self._targets = {False: {}, True: {}}
        return foreign

    def patch_anew(self) -> None:
        """Take the patches back and put them in place again, for other observers."""
        if self.in_place:
            self.restore()
            self.patch(self._settings, self._registered)

    def add(self, target: Target) -> None:
        """Patch one more target, now and when torch is patched anew."""
        self._patch_more([target], of_half_models=False)
        self._registered.append(target)

    # -- the rules of the table, and registrations --

    def _patch_more(self, targets: Iterable[Target], *, of_half_models: bool) -> None:
        with self.patches.all_or_nothing():
            own, within = ((), targets) if of_half_models else (targets, ())
            self._patch_targets(own, within, {})

    def _patch_targets(
        self, own: Iterable[Target], within: Iterable[Target], functions: dict[int, tuple[Any, Any]]
    ) -> None:
        """Patch targets, and rebind the names by which other modules hold them or the given functions.

        Args:
            own: The targets of the handle's own rules and of registrations.
            within: Those of the rules inside half models.
            functions: By id, other originals with their replacements.
        """
        places: dict[tuple[int, str], Target] = {}
        for of_half_models, targets in enumerate((own, within)):
            found = {(id(one.parent), one.attribute): one for one in targets}
            self._targets[bool(of_half_models)] |= found
            places |= {place: one for place, one in found.items() if one.rule.policy is not CastPolicy.NONE}
        pairs = []
        for place, target in places.items():
            replacement = None
            # Inside half models the rules for these act; elsewhere what is built last.
            for of_half_models in (True, False):
                found_here = self._targets[of_half_models].get(place)
                if found_here is not None and found_here.rule.policy is not CastPolicy.NONE:
                    replacement = self._replacement(found_here, of_half_models, replacement)
            self.patches.replace(target.parent, target.attribute, replacement)
            pairs.append((target, replacement))
        if self._settings.rebind:
            wanted = {id(target.original): (target.original, replacement) for target, replacement in pairs}
            self.patches.rebind({**wanted, **functions}, owns_its_names)
        for target, replacement in pairs:
            # A builtin's was named by the first of its targets.
            if self._named.get(id(replacement)) is not target:
                name_by(replacement, *target.names)
        if any(target.parent is torch.Tensor for target, _ in pairs):
            torch_private.forget_compiled_code()

    def _replacement(self, target: Target, of_half_models: bool, elsewhere: Any) -> Any:
        """Return what stands in for a target's original; ``elsewhere`` is called where its rule does not act."""
        rule, settings = target.rule, self._settings
        key = (id(target.original), rule.policy, id(target.functional), of_half_models, id(elsewhere))
        if key not in self._built:
            module, qualname = target.names
            replacement = build_replacement(
                target.original, rule.policy, self._optimizers.casts,
                module=module, qualname=qualname, functional=target.functional,
                remedy=rule.remedy, allow_banned=settings.allow_banned,
                active=HALF_MODEL if of_half_models else True, elsewhere=elsewhere,
            )  # fmt: skip
            for layer in self._optimizers.listeners.op_layer:
                replacement = mark(layer(replacement, target, of_half_models), target.original)
            # With its target, which keeps the objects alive whose ids are in the key.
            self._built[key] = (target, replacement)
            if not isinstance(target.original, types.FunctionType):
                self._named[id(replacement)] = target
            self._compilers.add(target.original, replacement)
        return self._built[key][1]

    def _defer(self, rule: CastRule, of_half_models: bool) -> None:
        """Patch a target once its module is imported: any of the packages on the way may be the one."""
        waiting = rule, of_half_models
        self._waiting.append(waiting)

        def imported(_: types.ModuleType) -> None:
            if waiting not in self._waiting:
                return
            try:
                found = locate(rule)
                if found is not None:
                    self._waiting.remove(waiting)
                    self._patch_more(found, of_half_models=of_half_models)
            except (ListFileError, PatchError) as error:
                # The import of somebody's package must not fail for a typo in a list.
                warn_user(f"a rule has no effect: {error}")

        parts = rule.target.split(".")
        for end in range(1, len(parts)):
            self.patches.when_imported(".".join(parts[:end]), imported)

    # -- what the rules do --

    def rule_on(self, original: Any, *, in_half_models: bool = False) -> CastRule | None:
        """Return the rule by which a function was replaced; None for any other object."""
        built = (target for key, (target, _) in self._built.items() if key[3] is in_half_models)
        return next((target.rule for target in built if target.original is original), None)

    def unmatched_rules(self) -> dict[str, str]:
        """Return the ops of the user's lists that were not patched so far, each with a message for the user."""
        rules = [rule for rule, _ in self._waiting if not rule.origin.shipped]
        return {rule.target: f"{rule.target!r} ({rule.origin}) names nothing that was imported" for rule in rules}
