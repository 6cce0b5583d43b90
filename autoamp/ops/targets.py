"""From names to places: what each rule of a table patches in the torch that is installed."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoamp.errors import ListFileError, PatchError
from autoamp.patching import original_of, resolve
from autoamp.rules import CastPolicy, CastRule, CastTable, admits_version, check_bare_names
from autoamp.torch_private import RECURRENT

__all__ = ["Expansion", "Target", "expand", "known_ops", "locate", "owns_its_names", "target_at"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One attribute to patch.

    Attributes:
        parent: The module or class that holds it.
        attribute: Its name there.
        original: What is there now, replacements of ours taken off.
        rule: The rule that asks for the patch.
        functional: For an in-place form the out-of-place function it is derived from, else None.
    """

    parent: Any
    attribute: str
    original: Any
    rule: CastRule
    functional: Any = None

    @property
    def module(self) -> str:
        """The name of the module by which the target is reached."""
        return str(self.parent.__name__ if isinstance(self.parent, types.ModuleType) else self.parent.__module__)

    @property
    def qualname(self) -> str:
        """The target's name in that module."""
        if isinstance(self.parent, types.ModuleType):
            return self.attribute
        owner = self.parent if isinstance(self.parent, type) else type(self.parent)
        return f"{owner.__qualname__}.{self.attribute}"

    @property
    def name(self) -> str:
        """The dotted name of the target."""
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a table comes to in this process.

    Attributes:
        targets: What to patch now.
        deferred: Rules on modules that are not imported yet.
        skipped: Rules of shipped list sets on names that this torch lacks.
    """

    targets: tuple[Target, ...]
    deferred: tuple[CastRule, ...]
    skipped: tuple[CastRule, ...]


@functools.cache
def _namespaces() -> tuple[Any, ...]:
    return (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)


@functools.cache
def known_ops() -> frozenset[str]:
    """Return every name that a bare rule may use: the callables of torch's public namespaces that are no classes."""
    names = set()
    for namespace in _namespaces():
        for name, value in _attributes(namespace).items():
            is_public = namespace is torch.Tensor or not name.startswith("__")
            if is_public and callable(value) and not isinstance(value, type):
                names.add(name)
    return frozenset(names)


def _attributes(namespace: Any) -> dict[str, Any]:
    """Return the attributes of a module or a class, inherited ones included, as they stand there."""
    attributes: dict[str, Any] = {}
    for base in reversed(namespace.__mro__) if isinstance(namespace, type) else [namespace]:
        attributes.update(vars(base))
    return attributes


def expand(table: CastTable) -> Expansion:
    """Resolve a table's rules, the later over the earlier for the same place.

    Raises:
        ListFileError: A rule names an op that torch does not have, or an attribute that an imported module does not
            have, unless the rule stands in a shipped list set.
    """
    rules = tuple(rule for rule in table.rules if admits_version(rule.versions, torch.__version__))
    table = replace(table, rules=rules)
    lacking = check_bare_names(table, known_ops())
    # An op that is left alone is as well off where torch lacks it.
    skipped = [rule for rule in lacking if rule.policy is not CastPolicy.NONE]
    lacking_targets = {rule.target for rule in lacking}
    places: dict[tuple[int, str], Target] = {}
    patched: set[str] = set()
    deferred: list[CastRule] = []
    spaces = [(namespace, _attributes(namespace)) for namespace in _namespaces()]
    for rule in table.rules:
        if rule.target in lacking_targets:
            continue
        if rule.policy is CastPolicy.NONE and rule.bare and patched.isdisjoint(_names(rule.target)):
            continue
        if rule.bare:
            found: tuple[Target, ...] | None = tuple(_spellings(rule, spaces))
        else:
            try:
                found = locate(rule)
            except ListFileError:
                if not rule.origin.shipped:
                    raise
                skipped.append(rule)
                continue
        if found is None:
            deferred.append(rule)
            continue
        for target in found:
            place = (id(target.parent), target.attribute)
            places.pop(place, None)
            if rule.policy is not CastPolicy.NONE:
                places[place] = target
                patched.add(target.attribute)
    return Expansion(tuple(places.values()), tuple(deferred), tuple(skipped))


def locate(rule: CastRule) -> tuple[Target, ...] | None:
    """Resolve a dotted rule: that target alone. None while its module is not imported.

    A class stands for the method that does its work: ``forward`` of a module, ``apply`` of an autograd function.

    Raises:
        ListFileError: The module is imported and has no such attribute, or the target is nothing that is called.
    """
    try:
        found = resolve(rule.target)
    except PatchError as error:
        raise ListFileError(f"{rule.target!r} names nothing; {_nearest(rule.target)}", *_where(rule)) from error
    if found is None:
        return None
    parent, attribute, _ = found
    return (target_at(parent, attribute, rule),)


def target_at(parent: Any, attribute: str, rule: CastRule) -> Target:
    """Describe the patch of one attribute of a module, class or object.

    Raises:
        ListFileError: The attribute is nothing that is called.
    """
    # Of a class the descriptor itself is patched; of an object, what a call through the object finds.
    found = inspect.getattr_static(parent, attribute) if isinstance(parent, type) else getattr(parent, attribute)
    original = original_of(found)
    if isinstance(original, type):
        parent, attribute, original = _method_of(original, rule)
    if not callable(original) and not isinstance(original, (staticmethod, classmethod)):
        kind = type(original).__name__
        raise ListFileError(f"{rule.target!r} is a {kind}; name a function or a method", *_where(rule))
    return Target(parent, attribute, original, rule, _functional(parent, attribute))


def _method_of(cls: type, rule: CastRule) -> tuple[type, str, Any]:
    for base, method in ((torch.nn.Module, "forward"), (torch.autograd.Function, "apply")):
        if issubclass(cls, base):
            return cls, method, original_of(inspect.getattr_static(cls, method))
    raise ListFileError(
        f"{rule.target!r} is a class; only an nn.Module or an autograd.Function can stand in a list", *_where(rule)
    )


def _spellings(rule: CastRule, spaces: list[tuple[Any, dict[str, Any]]]) -> Iterator[Target]:
    """Every public spelling of a bare name, and the in-place forms derived from it.

    Args:
        rule: A rule on a bare name.
        spaces: torch's public namespaces, each with its attributes.
    """
    for name in _names(rule.target):
        if name != rule.target and rule.policy is CastPolicy.FP16:
            # A product in place goes on in what it is written to, as under autocast: no rule to half speaks for that.
            # But half factors, which the program knows nothing of, are no error.
            rule = replace(rule, policy=CastPolicy.PROMOTE)
        in_torch = None
        for namespace, attributes in spaces:
            original = _callable(attributes.get(name))
            if original is None:
                continue
            in_torch = original if namespace is torch else in_torch
            functional = _functional_in(attributes, name)
            if functional is None and name != rule.target:
                # Nothing to derive it from: `normal_` fills, and no `Tensor.normal` computes what it fills with.
                continue
            yield Target(namespace, name, original, rule, functional)
            yield from _definition(original, name, rule)
        # What torch spells in Python calls torch._VF itself; only recurrent layers go to torch._VF past torch.
        if in_torch is not None and not isinstance(in_torch, types.FunctionType):
            original = _callable_at(RECURRENT, name)
            functional = _functional(RECURRENT, name)
            if original is not None and (functional is not None or name == rule.target):
                yield Target(RECURRENT, name, original, rule, functional)


def _definition(original: Any, name: str, rule: CastRule) -> Iterator[Target]:
    """The module that defines a Python function which torch exports under the same name (`torch.functional.einsum`)."""
    if isinstance(original, types.FunctionType):
        module = sys.modules.get(original.__module__)
        if module is not None and original_of(vars(module).get(name)) is original:
            yield Target(module, name, original, rule)


def _callable_at(namespace: Any, name: str) -> Any:
    if namespace is RECURRENT:
        return _callable(getattr(namespace, name, None) if hasattr(torch, name) else None)
    return _callable(_attributes(namespace).get(name))


def _callable(value: Any) -> Any:
    if value is None:
        return None
    value = original_of(value)
    return value if callable(value) and not isinstance(value, type) else None


def _names(bare: str) -> tuple[str, str]:
    return bare, _inplace_name(bare)


def _inplace_name(name: str) -> str:
    return f"__i{name[2:]}" if name.startswith("__") else f"{name}_"


def _functional(parent: Any, attribute: str) -> Any:
    """The out-of-place function beside torch's in-place form, None for anything else."""
    if parent is RECURRENT:
        name = _outofplace_name(attribute)
        return None if name is None else _callable_at(parent, name)
    if not any(parent is namespace for namespace in _namespaces()):
        return None
    return _functional_in(_attributes(parent), attribute)


def _functional_in(attributes: dict[str, Any], attribute: str) -> Any:
    name = _outofplace_name(attribute)
    return None if name is None else _callable(attributes.get(name))


def _outofplace_name(attribute: str) -> str | None:
    """The name of what an in-place form is derived from, None for the name of anything else."""
    if attribute.startswith("__i") and attribute.endswith("__"):
        return f"__{attribute[3:]}"
    if attribute.endswith("_") and not attribute.endswith("__"):
        return attribute[:-1]
    return None


def _where(rule: CastRule) -> tuple[str, int | None]:
    return rule.origin.path, rule.origin.line


def _nearest(dotted: str) -> str:
    """Say what comes nearest to the first part of a dotted name that is not there."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        holder: Any = sys.modules.get(".".join(parts[:end]))
        if holder is not None:
            break
    else:
        return "no part of it is imported"
    while end < len(parts) - 1 and hasattr(holder, parts[end]):
        holder, end = getattr(holder, parts[end]), end + 1
    path = ".".join(parts[:end])
    near = difflib.get_close_matches(parts[end], dir(holder), n=3)
    if not near:
        return f"{path!r} has nothing like {parts[end]!r}"
    return f"did you mean {' or '.join(repr(f'{path}.{name}') for name in near)}?"


def owns_its_names(module_name: str) -> bool:
    """Tell whether a module's globals are torch's own business and must not be rebound.

    torch's compiler, decompositions and tracers keep the original functions as keys; the modules in which torch writes
    layers and distributions call them as any user would.
    """
    if module_name == "autoamp" or module_name.startswith("autoamp."):
        return True
    if module_name != "torch" and not module_name.startswith("torch."):
        return False
    # In torch.nn.functional every public name is a target of its own: what no rule covers there is to stay.
    return module_name == "torch.nn.functional" or not module_name.startswith(("torch.nn.", "torch.distributions."))
