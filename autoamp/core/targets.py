"""What each rule of a table patches: the attributes that its name means in the installed torch and imported modules.

Dotted names are resolved without importing anything, and it is said of those that do not exist.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from typing import Any

import torch
import wrapt

from autoamp.core.patches import original_of
from autoamp.core.rules import CastPolicy, CastRule, CastTable, admits_version, did_you_mean, fail
from autoamp.errors import ListFileError, PatchError, kind_of
from autoamp.torch_private import RECURRENT


def resolve(dotted: str) -> tuple[Any, str, Any] | None:
    """Find a dotted name among the modules that are imported already. Imports nothing.

    Returns:
        ``(parent, attribute, original)``, the last below any replacement of ours; None while the name's module is not
        imported.

    Raises:
        PatchError: The module is imported and has no such attribute.
    """
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            break
    else:
        return None
    # A package that loads its submodules lazily would import one when it is asked for the attribute.
    path = getattr(module, "__path__", None)
    if (
        path is not None
        and parts[end] not in getattr(module, "__dict__", {})
        # `importlib.util.find_spec` would import the package, and so wait for another thread that imports it just now.
        and PathFinder.find_spec(f"{module.__name__}.{parts[end]}", path) is not None
    ):
        return None
    try:
        parent, attribute, original = wrapt.resolve_path(module, ".".join(parts[end:]))
    except AttributeError as error:
        raise PatchError(f"{dotted!r} does not exist: {error}") from error
    return parent, attribute, original_of(original)


def spelled_out(dotted: str) -> str | None:
    """Return torch's whole name for what programs shorten to ``nn.Linear`` or ``F.softmax``; None for any other name.

    Where the first part is a module that is there or can be imported, the name is no short one.
    """
    first, _, rest = dotted.partition(".")
    if not rest or first in sys.modules or PathFinder.find_spec(first) is not None:
        return None
    for whole in (f"torch.nn.functional.{rest}" if first == "F" else dotted, f"torch.{dotted}", f"torch.nn.{dotted}"):
        with contextlib.suppress(PatchError):
            if resolve(whole) is not None:
                return whole
    return None


def explain_missing(dotted: str, admits: Callable[[Any], bool] = lambda value: True) -> str:
    """Say which names come nearest to the first part of a dotted name that does not exist.

    Args:
        dotted: A name that `resolve` refuses: a part of it is imported.
        admits: Tells of a value whether the whole name may mean it.
    """
    parts = dotted.split(".")
    end = next(end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in sys.modules)
    holder: Any = sys.modules[".".join(parts[:end])]
    while end < len(parts) - 1 and hasattr(holder, parts[end]):
        holder, end = getattr(holder, parts[end]), end + 1
    path, rest = ".".join(parts[:end]), "".join(f".{part}" for part in parts[end + 1 :])
    names = [name for name in dir(holder) if rest or admits(getattr(holder, name, None))]
    near = [repr(f"{path}.{name}{rest}") for name in difflib.get_close_matches(parts[end], names, n=3)]
    return f"{path} has no {parts[end]!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One attribute to patch.

    Attributes:
        parent: The module, class or object whose attribute it is.
        attribute: Its name there.
        original: What is there now, below any replacement of ours.
        rule: The rule that asks for the patch.
        functional: For an in-place form the function that computes the same out of place, else None.
    """

    parent: Any
    attribute: str
    original: Any
    rule: CastRule
    functional: Any = None

    @property
    def names(self) -> tuple[str, str]:
        """The name of the module by which the target is reached, and its own name there."""
        parent = self.parent
        if isinstance(parent, types.ModuleType):
            return parent.__name__, self.attribute
        owner = parent if isinstance(parent, type) else type(parent)
        # An instance of a class of Python's own, such as types.SimpleNamespace, has none.
        return str(getattr(parent, "__module__", owner.__module__)), f"{owner.__qualname__}.{self.attribute}"

    @property
    def name(self) -> str:
        """The dotted name of the target."""
        return ".".join(self.names)


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a table's rules mean in this process.

    Attributes:
        targets: What to patch now.
        deferred: Rules on attributes of modules that are not imported yet.
        skipped: Rules of shipped list sets on names that the installed torch, or another imported module, lacks.
    """

    targets: tuple[Target, ...]
    deferred: tuple[CastRule, ...]
    skipped: tuple[CastRule, ...]


_BUILTINS = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})

_NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)
"""The public namespaces of torch in which a bare name is looked up."""


@functools.cache
def known_ops() -> frozenset[str]:
    """Return every name that a bare rule may use: callables in torch's public namespaces, but no classes."""
    return frozenset(
        name
        for namespace in _NAMESPACES
        for name, value in _values_of(namespace).items()
        if (namespace is torch.Tensor or not name.startswith("__")) and _function(value) is not None
    )


def _values_of(namespace: Any) -> dict[str, Any]:
    """Return what a module has, or a class with what it inherits, by name; replacements too."""
    if not isinstance(namespace, type):
        return vars(namespace)  # type: ignore[no-any-return]
    values: dict[str, Any] = {}
    for base in reversed(namespace.__mro__):
        values.update(vars(base))
    return values


def _function(value: Any) -> Any:
    """Return a function or method without replacements; None for anything else, classes too."""
    original = original_of(value)
    return original if callable(original) and not isinstance(original, type) else None


def expand(table: CastTable) -> Expansion:
    """Resolve a table's rules. Where several mean the same attribute the last one applies.

    Rules whose ``versions`` do not admit the installed torch are passed over.

    Raises:
        ListFileError: A rule names an op that torch does not have, or an attribute that an imported module does not
            have, unless the rule stands in a shipped list set.
    """
    skipped: list[CastRule] = []
    places: dict[tuple[int, str], Target] = {}
    patched: set[str] = set()
    deferred: list[CastRule] = []
    ops, spaces = known_ops(), [(namespace, _values_of(namespace)) for namespace in _NAMESPACES]
    for rule in table.rules:
        found: Sequence[Target] | None = ()
        if rule.versions and not admits_version(rule.versions, torch.__version__):
            continue
        if "." in rule.target:
            try:
                found = locate(rule)
            except ListFileError:
                if not rule.origin.shipped:
                    raise
                skipped.append(rule)
        elif rule.target not in ops:
            if not rule.origin.shipped:
                remedy = f"{did_you_mean(rule.target, known_ops())} Name any other function by its dotted name"
                fail(rule.origin, f"unknown op {rule.target!r} under {rule.policy.value}; {remedy}")
            # A rule to leave an op alone needs no report where torch lacks the op.
            skipped += [rule] if rule.policy is not CastPolicy.NONE else []
        elif rule.policy is not CastPolicy.NONE or (patched and not patched.isdisjoint(_names(rule.target))):
            found = _spellings(rule, spaces)
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
    """Resolve a dotted rule, whose name means one attribute alone. None while its module is not imported.

    The name of a class means its method: ``forward`` of an `nn.Module`, ``apply`` of an autograd function.

    Raises:
        ListFileError: The module is imported and has no such attribute; the name is short for one of torch, such as
            ``F.softmax``; or the attribute cannot be called, or is any other class.
    """
    try:
        found = resolve(rule.target)
    except PatchError:
        fail(rule.origin, f"{rule.target!r} names nothing: {explain_missing(rule.target)}")
    if found is None:
        whole = spelled_out(rule.target)
        if whole is not None:
            fail(rule.origin, f"{rule.target!r} names nothing; did you mean {whole!r}?")
        return None
    parent, attribute, _ = found
    return (target_at(parent, attribute, rule),)


def target_at(parent: Any, attribute: str, rule: CastRule) -> Target:
    """Return the target for one attribute of a module, class or object.

    Raises:
        ListFileError: The attribute cannot be called, or is a class other than `locate` allows.
    """
    # In a class the descriptor is replaced; in a module or object, what the attribute's value is.
    found = inspect.getattr_static(parent, attribute) if isinstance(parent, type) else getattr(parent, attribute)
    original = original_of(found)
    if isinstance(original, type):
        parent = original
        if not issubclass(parent, (torch.nn.Module, torch.autograd.Function)):
            remedy = "of classes only an nn.Module or an autograd.Function can be listed"
            fail(rule.origin, f"{rule.target!r} is a class; {remedy}")
        attribute = "forward" if issubclass(parent, torch.nn.Module) else "apply"
        original = original_of(inspect.getattr_static(parent, attribute))
    if not callable(original) and not isinstance(original, (staticmethod, classmethod)):
        fail(rule.origin, f"{rule.target!r} is {kind_of(original)}; name a function or a method")
    in_torch = any(parent is namespace for namespace in (*_NAMESPACES, RECURRENT))
    functional = _functional(_values_of(parent), attribute) if in_torch and parent is not RECURRENT else None
    return Target(parent, attribute, original, rule, functional)


def _spellings(rule: CastRule, spaces: list[tuple[Any, dict[str, Any]]]) -> list[Target]:
    """Return the targets of a bare name: the attribute of that name in each namespace, and its in-place form there.

    Args:
        rule: A rule on a bare name.
        spaces: torch's public namespaces, each with what it has by name.
    """
    found: list[Target] = []
    names = _names(rule.target)
    for name in names:
        in_place, in_torch = name != rule.target, None
        if in_place and rule.policy is CastPolicy.FP16:
            # A product in place has the dtype of the tensor that it writes to, as under autocast: it is not cast to
            # half. Its factors are promoted to one dtype, as some of them may be half because of other rules.
            rule = replace(rule, policy=CastPolicy.PROMOTE)
        for namespace, values in spaces:
            original = values.get(name)
            # `_function` written out for builtins, as most are.
            if original is None or (type(original) not in _BUILTINS and (original := _function(original)) is None):
                continue
            functional = _functional(values, name) if name[-1] == "_" else None
            if namespace is torch:
                in_torch = original
            if in_place and functional is None:
                # No function may compute the same out of place: `Tensor.normal_` exists, `Tensor.normal` does not.
                continue
            found.append(Target(namespace, name, original, rule, functional))
            # The module that defines a Python function of torch has it too, such as `torch.functional.einsum`.
            module = sys.modules.get(original.__module__) if isinstance(original, types.FunctionType) else None
            if module is not None and original_of(vars(module).get(name)) is original:
                found.append(Target(module, name, original, rule))
        # Recurrent layers call builtins there, not in torch. Functions that torch writes in Python call that namespace
        # themselves, so it is enough to patch the functions.
        if in_torch is not None and not isinstance(in_torch, types.FunctionType):
            original = _function(getattr(RECURRENT, name, None))
            functional = _function(getattr(RECURRENT, rule.target, None)) if in_place else None
            if original is not None and (functional is not None or not in_place):
                found.append(Target(RECURRENT, name, original, rule, functional))
    return found


def _functional(values: dict[str, Any], name: str) -> Any:
    """Return the out-of-place function for the name of an in-place form in a namespace, None for any other name."""
    if name.startswith("__i") and name.endswith("__"):
        return _function(values.get(f"__{name[3:]}"))
    return _function(values.get(name[:-1])) if name.endswith("_") and not name.endswith("__") else None


@functools.cache
def _names(bare: str) -> tuple[str, str]:
    """Return the names that a rule on a bare name covers: ``add`` and ``add_``, ``__add__`` and ``__iadd__``."""
    return bare, f"__i{bare[2:]}" if bare.startswith("__") else f"{bare}_"


@functools.cache
def owns_its_names(module_name: str) -> bool:
    """Whether names that a module imported from torch must not be rebound to replacements.

    That is true of this package and of torch. torch's compiler, decompositions and tracers use the original functions
    as keys. But ``torch.nn`` and ``torch.distributions`` call the functions as any program does, so those are rebound.
    """
    if module_name.startswith(("torch.nn.", "torch.distributions.")):
        # In torch.nn.functional rules mean the names themselves: what no rule means there must stay.
        return module_name == "torch.nn.functional"
    return f"{module_name}.".startswith(("autoamp.", "torch."))
