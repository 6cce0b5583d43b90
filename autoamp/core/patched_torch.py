"""The patches of one handle: a table's targets, the module call and others, put in place together or not at all.

Some functions are replaced though no list names them. With ``init(scope="modules")`` half tensors of autoamp meet
numpy, fp32 tensors and numbers beyond fp16: a program for plain fp32 writes ``buffer[mask] = x``,
``x.masked_fill_(mask, -1e9)`` and ``x.numpy()``, which torch refuses for some half tensors. Here these go as they would
in fp32. Calls that torch takes are torch's own.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.core.casts import HALF_MODEL, CastState
from autoamp.core.optimizers import Guards
from autoamp.core.patch_sites import Place
from autoamp.core.patches import PatchSet, ScriptTable, mark, name_by, teach_dynamo, writing
from autoamp.core.policies import build_replacement
from autoamp.core.rules import CastPolicy, CastRule, CastTable
from autoamp.core.scope import autocast_functions
from autoamp.core.settings import Settings
from autoamp.core.special_calls import build_check_input, build_half_attention, build_script_call
from autoamp.core.targets import Target, expand, locate, owns_its_names
from autoamp.errors import ListFileError, PatchError, warn_user
from autoamp.tensors import iter_tensors, map_tensors

_CLAMPS = ("clamp", "clamp_max", "clamp_min", "clip")
_FILLS = ("index_fill", "masked_fill")
# What gives a new tensor or array, and refuses numbers that half does not hold, several dtypes, or bf16 itself.
_REDONE = (
    *((owner, name) for owner in (torch, Tensor) for name in (*_CLAMPS, *_FILLS)),
    (torch, "constant_pad_nd"),
    (torch, "full_like"),
    (torch.nn.functional, "embedding_bag"),
    (torch.nn.functional, "pad"),
    (Tensor, "new_full"),
    (Tensor, "numpy"),
)
# What writes a value to a tensor.
_WRITING = tuple((Tensor, name) for name in (*(f"{name}_" for name in (*_CLAMPS, *_FILLS)), "fill_", "__setitem__"))


def unlisted_functions(casts: CastState) -> Iterator[Place]:
    """Yield where each is, and what builds the replacement that `PatchSites.patch` names and marks."""
    yield torch.backends.mha, "get_fastpath_enabled", partial(_build_fast_path_check, casts=casts)
    yield torch.nn.RNNBase, "check_input", partial(build_check_input, casts=casts)
    for kind in torch_private.SCRIPTED:
        yield kind, "__call__", partial(build_script_call, casts=casts)
    if casts.in_modules:
        for build, places in ((_redone, _REDONE), (_writing, _WRITING)):
            for owner, name in places:
                yield owner, name, partial(build, casts=casts)
    if not casts.on_by_default:
        yield torch.nn.functional, "scaled_dot_product_attention", partial(build_half_attention, casts=casts)


def _build_fast_path_check(original: Callable[[], bool], casts: CastState) -> Any:
    """Build what the attention modules of torch ask for whether they may take their fast path for inference.

    That path computes all in the dtype of its input, norms included, so that a model would compute other bits without
    gradients. It is shut, as torch shuts it in its autocast regions, and stays open where the program turned casts off.
    """

    def get_fastpath_enabled() -> bool:
        return casts.thread.mode.on is False and casts.on_by_default and original()

    return get_fastpath_enabled


def _redone(original: Any, casts: CastState) -> Any:
    """Build the replacement of a function that gives something new: what torch refuses in half is done in fp32."""
    half = casts.dtype

    def redone(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except (RuntimeError, TypeError):
            if kwargs.get("out") is not None or all(one.dtype is not half for one in iter_tensors((args, kwargs))):
                raise
            new, new_kwargs = map_tensors((args, kwargs), lambda one: one.float() if one.dtype is half else one)
            return original(*new, **new_kwargs)

    return redone


def _writing(original: Any, casts: CastState) -> Any:
    """Build the replacement of a method that writes to a tensor: the value takes the tensor's dtype, and fits it."""
    half, most = casts.dtype, torch.finfo(casts.dtype).max
    # An index is no value.
    first = 1 if original.__name__ == "__setitem__" else 0

    def fit(tensor: Tensor, value: Any) -> Any:
        if isinstance(value, Tensor):
            if {value.dtype, tensor.dtype} != {half, torch.float32}:
                return value
            if value.dim() or value.requires_grad or tensor.dtype is not half:
                return value.to(tensor.dtype)
            value = value.item()
        if tensor.dtype is not half or type(value) not in (int, float) or not math.isfinite(value):
            return value
        return max(-most, min(most, value))

    def writing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != casts.device_type or tensor.dtype not in (half, torch.float32):
            return original(tensor, *args, **kwargs)
        values = [fit(tensor, value) for value in args[first:]]
        return original(tensor, *args[:first], *values, **{name: fit(tensor, one) for name, one in kwargs.items()})

    return writing


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

    def __init__(self, optimizers: Guards) -> None:
        self.in_place = False
        self.skipped_rules: tuple[CastRule, ...] = ()
        self._optimizers = optimizers
        self.patches = PatchSet()
        self._scripted = ScriptTable()
        self._registered: list[Target] = []
        # The rules that patched nothing so far: their module is not imported, or has no such name.
        self._waiting: list[tuple[CastRule, bool]] = []
        # By their places, the targets of the handle's own rules, and of those inside half models.
        self._targets: dict[bool, dict[tuple[int, str], Target]] = {False: {}, True: {}}
        # The target by which a replacement of a builtin was named.
        self._named: dict[int, Target] = {}
        # One replacement for each original, policy and in-place form, so that aliases stay the same object.
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
            casts.enable()
            try:
                with self.patches.all_or_nothing():
                    # Half models cast by themselves, as programs with half models do.
                    asked = () if settings.half_table is not None else autocast_functions(casts)
                    functions = sites.patch(self.patches, (*unlisted_functions(casts), *asked))
                    for original, replacement in functions.values():
                        self._scripted.add(original, replacement)
                    # Of several targets for one attribute the last: a registration goes before the lists.
                    self._patch_targets((*expansion.targets, *registered), within.targets, functions)
                    for of_half_models, found in enumerate((expansion, within)):
                        for rule in found.deferred:
                            self._defer(rule, bool(of_half_models))
                    local = casts.thread
                    teach_dynamo(
                        self.patches,
                        lambda function: local.with_mode(function, False, forced_off=True),
                        lambda function: local.with_mode(function, local.traced.on, local.traced.forced_off),
                    )
            except BaseException:
                casts.disable()
                self._take_back()
                raise
            self.in_place = True
        self._registered = list(registered)
        self.skipped_rules = tuple(dict.fromkeys((*expansion.skipped, *within.skipped)))
        # A program that has not set up logging shows warnings alone.
        level = logging.WARNING if settings.verbose else logging.DEBUG
        if log.isEnabledFor(level):
            count = len(expansion.targets) + len(within.targets)
            log.log(
                level, "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped", settings.dtype,
                settings.device_type, count, len(self.patches.late_bound), len(self.skipped_rules),
            )  # fmt: skip

    def restore(self) -> tuple[str, ...]:
        """Take the patches back and return the names that others patched on top."""
        with writing:
            if not self.in_place:
                # Another thread has restored torch since.
                return ()
            self.in_place = False
            self._optimizers.casts.disable()
            return self._take_back()

    def _take_back(self) -> tuple[str, ...]:
        try:
            self._optimizers.sites.restore()
        finally:
            foreign = self.patches.restore()
            self._scripted.forget()
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
            self._scripted.add(target.original, replacement)
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
