"""What a handle is made from: checked arguments, the defaults in their place, and precisions of single modules.

Lists and `handle.override()` give a module a precision, which is kept by a tag: a random string in the module's
``__dict__``, and here what the string means. A module that is given something refers to nothing of ours, and nothing
here refers to it. A copy carries the string along, and with it what the module was given; to another handle or process
the string means nothing. The string means something as long as the module lives, or a copy of it that is no pickle's.
"""

from __future__ import annotations

import difflib
import fnmatch
import platform
import sys
import uuid
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from autoamp.core.loader import load_table, located
from autoamp.core.loss_scale import make_scaler
from autoamp.core.rules import CastTable, ModulePrecision, ModuleRule, fail
from autoamp.core.targets import explain_missing, resolve, spelled_out
from autoamp.errors import PatchError, UsageError, warn_user
from autoamp.half_units import default_half_dtype, half_dtype
from autoamp.tensors import default_device_type
from autoamp.torch_private import trace_as

TAGS = "_autoamp_tags"
"""The entry of a module's ``__dict__`` that has its tags, a tuple of strings. One without tags has no such entry."""

T = TypeVar("T")


class _Tag(str):
    """A tag that a module shares with its copies, so that it lives as long as one of them. In a pickle it is a str.

    Attributes:
        tags: A weak reference to the tags that it is one of.
    """

    tags: weakref.ref[ModuleTags[Any]]

    def __deepcopy__(self, memo: Any) -> _Tag:
        tags = self.tags()
        holder = None if tags is None else tags.holder(str(self))
        if tags is not None and tags.copied is not None and holder is not None:
            tags.copied(holder)
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)


def _get_traced(tags: ModuleTags[Any], module: Module, default: Any = None) -> Any:
    """`ModuleTags.get` for Dynamo, which guards on an attribute that is missing, and on no missing key of a dict."""
    for tag in reversed(getattr(module, TAGS, ())):
        if tag in tags.values:
            return tags.values[str(tag)]
    return default


class ModuleTags(Generic[T]):
    """Tags of one meaning.

    Attributes:
        values: What each tag stands for.
        any: Whether there may be values. Compiled code guards on it, as it does not on a dict.
        copied: Is told of a module that has a tag, when it or a copy of it is deep-copied.
    """

    def __init__(self, copied: Callable[[Module], object] | None = None) -> None:
        self.copied = copied
        self.values: dict[str, T] = {}
        self.any = False
        # The modules that the tags were given to.
        self._holders: dict[str, weakref.ref[Module]] = {}

    def give(self, module: Module, value: T) -> str:
        """Give a module a value, above those that it was given before, and return the tag, for `take`."""
        tag = _Tag(uuid.uuid4().hex)
        tag.tags = weakref.ref(self)
        key = str(tag)
        self.values[key], self._holders[key], self.any = value, weakref.ref(module), True
        weakref.finalize(tag, self.take, key).atexit = False
        vars(module)[TAGS] = (*vars(module).get(TAGS, ()), tag)
        return key

    def replace(self, module: Module, value: T) -> None:
        """Give a module a value in place of all that it has; what it has as a copy stays that of its original."""
        vars(module)[TAGS] = tuple(tag for tag in vars(module).get(TAGS, ()) if tag not in self.values)
        self.give(module, value)

    @trace_as(_get_traced)
    def get(self, module: Module, default: Any = None) -> T | Any:
        """Return the last value that a module was given, or the one it is a copy of; ``default`` without any."""
        tags: tuple[str, ...] = module.__dict__.get(TAGS, ())
        for tag in reversed(tags):
            if tag in self.values:
                return self.values[tag]
        return default

    def holder(self, tag: str) -> Module | None:
        """Return the module that a tag was given to; None where it is gone, or the tag means nothing any more."""
        found = self._holders.get(tag)
        return None if found is None else found()

    def take(self, tag: str) -> None:
        """Let a tag mean nothing any more, and the module that it was given to, if it is still there, not carry it."""
        module = self.holder(tag)
        if module is not None:
            rest = tuple(other for other in vars(module).get(TAGS, ()) if other != tag)
            if rest:
                vars(module)[TAGS] = rest
            else:
                vars(module).pop(TAGS, None)
        self.values.pop(tag, None)
        self._holders.pop(tag, None)
        self.any = bool(self.values)

    def take_all(self, modules: Container[Module] | None = None) -> None:
        """Take the tags that these modules were given, by default those of all."""
        for tag, holder in list(self._holders.items()):
            if modules is None or holder() in modules:
                self.take(tag)


_GLOB = frozenset("*?[")
# What a module has that was given nothing. None is a precision too: that of the list.
_ABSENT: Any = object()


class Override:
    """Modules with their own precision until ``undo()``, or until the end of a ``with`` statement.

    Args:
        tags: Holds the precisions.
        precisions: The precision of each module; None for that of the lists.
    """

    def __init__(
        self, tags: ModuleTags[ModulePrecision | None], precisions: Mapping[Module, ModulePrecision | None]
    ) -> None:
        self._tags = tags
        self._given = [tags.give(module, given) for module, given in precisions.items()]

    def undo(self) -> None:
        """Restore the precision of every module. Overrides may be undone in any order, and more than once."""
        while self._given:
            self._tags.take(self._given.pop())

    def modules(self) -> Iterator[Module]:
        """Iterate over the modules that still exist."""
        return (module for tag in self._given if (module := self._tags.holder(tag)) is not None)

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


class ModulePrecisions:
    """Which modules run in a precision of their own: by class from the list, by instance through `Override`.

    Attributes:
        has_class_rules: Whether a list names classes: then each module's class is looked up at its calls.
        has_rules: Whether a list names paths or classes: then paths are looked up at the first call of a model.
    """

    def __init__(self) -> None:
        # Set after the first step: a script may define a class until then.
        self._checked = False
        self._warned: set[ModuleRule] = set()
        self._tags: ModuleTags[ModulePrecision | None] = ModuleTags()
        self._matched: set[ModuleRule] = set()
        self.use(())

    def use(self, rules: Iterable[ModuleRule]) -> None:
        """Follow these rules from now on. What modules were given stays."""
        self._rules = tuple(rules)
        self._class_rules = tuple(
            rule for rule in self._rules if "." in rule.pattern and not _GLOB.intersection(rule.pattern)
        )
        self._by_class: weakref.WeakKeyDictionary[type, ModulePrecision | None] = weakref.WeakKeyDictionary()
        # Modules within which paths were looked up.
        self._searched: weakref.WeakSet[Module] = weakref.WeakSet()
        self.has_class_rules, self.has_rules = bool(self._class_rules), bool(self._rules)

    @property
    def any(self) -> bool:
        """Whether any module may have a precision of its own."""
        return self.has_class_rules or self._tags.any

    def get(self, module: Module) -> ModulePrecision | None:
        """Return the precision a module was given, None where it runs as the list says."""
        found = self._tags.get(module, _ABSENT)
        if found is not _ABSENT:
            return found
        return self._of_class(type(module)) if self._class_rules else None

    def override(self, module: Module, precision: str) -> Override:
        """Give one module, with all it calls, a precision.

        Raises:
            UsageError: The precision is none of ``"fp32"``, ``"fp16"`` and ``"none"``.
        """
        try:
            return Override(self._tags, {module: ModulePrecision(precision)})
        except ValueError:
            raise UsageError(f"precision={precision!r} is unknown; choose 'fp32', 'fp16', 'half' or 'none'") from None

    def override_paths(self, model: Module) -> Override:
        """Give the submodules of ``model`` what the list's path patterns say, the later pattern over the earlier."""
        return Override(self._tags, self._by_path(model))

    def begin_model(self, model: Module) -> None:
        """Give the submodules of an outermost module what the path patterns say, at its first call.

        Modules with a precision of their own keep it. Paths begin within wrappers for data parallelism and compilation.
        """
        if model in self._searched:
            return
        self._searched.update(model.modules())
        inner: Any = model
        while inner is not None:
            model, wrapped = inner, isinstance(inner, (DataParallel, DistributedDataParallel))
            inner = model.module if wrapped else getattr(model, "_orig_mod", None)
        for module, precision in self._by_path(model, warns=False).items():
            if self._tags.get(module, _ABSENT) is _ABSENT:
                self._tags.give(module, precision)

    def fp32_parts(self, model: Module) -> tuple[set[Module], dict[Module, bool]]:
        """Return what the list says of the modules of a model that is cast to half.

        Returns:
            The modules that stay fp32: those that the list names, with all that they contain. And the modules whose
            precision is not that of the module around, each with whether it is fp32.
        """
        listed = {module: self._of_class(type(module)) for module in model.modules()} | self._by_path(model)
        parts: dict[Module, bool] = {}
        borders: dict[Module, bool] = {}

        waiting = [(model, False)]
        while waiting:
            module, around = waiting.pop()
            if module not in parts:
                precision = listed[module]
                parts[module] = is_fp32 = around if precision is None else precision is ModulePrecision.FP32
                if is_fp32 is not around:
                    borders[module] = is_fp32
                waiting += [(child, is_fp32) for child in reversed(list(module.children()))]
        return {module for module, is_fp32 in parts.items() if is_fp32}, borders

    def _by_path(self, model: Module, *, warns: bool = True) -> dict[Module, ModulePrecision | None]:
        """Return what the path patterns say of submodules. ``warns``: of a pattern that matches none."""
        names = dict(model.named_modules())
        chosen: dict[str, ModulePrecision | None] = {}
        for rule in self._rules:
            matched = fnmatch.filter(names, rule.pattern)
            chosen.update(dict.fromkeys(matched, _listed(rule)))
            self._matched.update([rule] if matched else [])
            if matched or not warns:
                continue
            is_class = rule in self._class_rules and (
                any(_is_named(type(module), rule.pattern) for module in names.values())
                or _class_at(rule.pattern) is not None
                # A class that the script may yet define is told of after the first step.
                or (_fault(rule.pattern, waits=True) is None and _fault(rule.pattern, waits=False) is not None)
            )
            if not is_class:
                self._warned.add(rule)
                near = difflib.get_close_matches(rule.pattern, names, n=3)
                warn_user(
                    f"{rule.origin}: {rule.pattern!r} matches no module of {type(model).__name__}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                )
        return {names[name]: precision for name, precision in chosen.items()}

    def warn_of_unmatched(self) -> None:
        """Warn once, after the first step, of rules on classes that do not exist, and on paths that no model has."""
        rules = () if self._checked else self._rules
        self._checked = True
        for rule in rules:
            if rule in self._matched or rule in self._warned or rule.origin.shipped:
                continue
            fault = _fault(rule.pattern, waits=False) if rule in self._class_rules else None
            if fault is None and self._is_path(rule) and _class_at(rule.pattern) is None:
                fault = self._why_unmatched(rule, [])
            if fault is not None:
                warn_user(f"a rule has no effect: {rule.origin}: {rule.pattern!r} under modules {fault}")

    def unmatched(self) -> dict[str, str]:
        """Return the patterns that no module matched so far, each with a message for the user."""
        rules = [rule for rule in self._rules if rule not in self._matched and not rule.origin.shipped]
        names = [] if not rules else sorted(_names_of_classes(Module))
        return {rule.pattern: f"{rule.pattern!r} ({rule.origin}) {self._why_unmatched(rule, names)}" for rule in rules}

    def _why_unmatched(self, rule: ModuleRule, names: list[str]) -> str:
        same_name = [name for name in names if name.rpartition(".")[2] == rule.pattern.rpartition(".")[2]]
        near = same_name[:3] or difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.75)
        if _class_at(rule.pattern) is not None:
            return "names a class of which no module was called"
        why = "is the path of no module that was called" if self._is_path(rule) else "names no class"
        return why + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")

    def _is_path(self, rule: ModuleRule) -> bool:
        """Whether a rule is for paths, as far as its spelling tells: the names of classes have capitals."""
        return rule not in self._class_rules or not rule.pattern.rpartition(".")[2][:1].isupper()

    def source_of(self, module: Module, path: str) -> str:
        """Return which rule of the lists gives a module at this path a precision, or what else does."""
        classes = [rule for rule in self._class_rules if _is_named(type(module), rule.pattern)]
        rules = [rule for rule in self._rules if fnmatch.fnmatch(path, rule.pattern)] or classes
        return located(rules[-1].origin) if rules else "an override or the opt level"

    def undo_all(self, modules: Container[Module] | None = None) -> None:
        """Undo what overrides say of these modules, by default of all."""
        self._tags.take_all(modules)

    def _of_class(self, cls: type) -> ModulePrecision | None:
        if cls in self._by_class:
            return self._by_class[cls]
        found = None
        for rule in self._class_rules:
            if _is_named(cls, rule.pattern):
                found = _listed(rule)
                self._matched.add(rule)
        self._by_class[cls] = found
        return found


def check_module_rules(rules: Iterable[ModuleRule]) -> None:
    """Check that what is written as the class of a module is one, as far as that can be told by now.

    Raises:
        ListFileError: torch, or another package that is imported, has no such class; or it is named without its module.
    """
    for rule in rules:
        wrong = None if _GLOB.intersection(rule.pattern) else _fault(rule.pattern)
        if wrong is not None:
            fail(rule.origin, f"{rule.pattern!r} under modules {wrong}")


def _fault(pattern: str, *, waits: bool = True) -> str | None:
    """Return what is wrong with a pattern without wildcards; None where it is a class, or may be a path.

    Args:
        pattern: The pattern.
        waits: Whether a class may yet be defined by a module that is still executed.
    """
    parts = pattern.split(".")
    if len(parts) == 1:
        if not _is_module_class(getattr(torch.nn, pattern, None)):
            return None
        return (
            f"is a class without its module; did you mean 'torch.nn.{pattern}'? For submodules of that name write "
            f"'{pattern}*'"
        )
    # A path such as "model.layers.0" may begin as an imported module does; classes have capitals.
    whole = spelled_out(pattern)
    if whole is not None and _is_module_class(_class_at(whole)):
        return f"names no class; did you mean {whole!r}?"
    if parts[0] != "torch" and (parts[0] not in sys.modules or not parts[-1][:1].isupper()):
        return None
    try:
        found = resolve(pattern)
    except PatchError:
        module = next(filter(None, (sys.modules.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))))
        # The script itself, or an import that has not ended, may yet define it.
        runs = getattr(module, "__name__", None) in ("__main__", "__mp_main__")
        runs |= bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
        return None if waits and runs else f"names no class: {explain_missing(pattern, _is_module_class)}"
    # A submodule may not be imported yet.
    is_class = found is None or _is_module_class(found[2])
    return None if is_class else "is no class of modules: write one, such as 'torch.nn.BatchNorm2d'"


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Module)


def _names_of_classes(base: type[Module]) -> set[str]:
    """Return the dotted names of all classes that derive from one; those of torch by their names in `torch.nn`."""
    names: set[str] = set()
    for cls in base.__subclasses__():
        names.add(class_name(cls))
        names |= _names_of_classes(cls)
    return names


def _listed(rule: ModuleRule) -> ModulePrecision | None:
    # In a list "none" takes an earlier entry away: the module runs as the rest of the list says.
    return None if rule.precision is ModulePrecision.NONE else rule.precision


def _class_at(dotted: str) -> type | None:
    try:
        found = resolve(dotted)
    except PatchError:
        return None
    return found[2] if found is not None and isinstance(found[2], type) else None


def _is_named(cls: type, dotted: str) -> bool:
    """Whether a class, or one it derives from, goes by a dotted name: its own, or one it is exported by."""
    exported = _class_at(dotted)
    return any(base is exported or _name_of(base) == dotted for base in cls.__mro__)


def class_name(cls: type) -> str:
    """Return the dotted name of a class of modules for a list; of torch's classes that in `torch.nn`."""
    in_torch = getattr(torch.nn, cls.__name__, None) is cls
    return f"torch.nn.{cls.__name__}" if in_torch else _name_of(cls)


def _name_of(cls: type) -> str:
    # What is `__main__` in the first process is `__mp_main__` in those that multiprocessing spawns.
    return f"{cls.__module__}.{cls.__qualname__}".replace("__mp_main__", "__main__", 1)


OnNonfinite = Literal["warn", "raise", "skip"]
Scope = Literal["global", "modules"]
"""Where `init` casts."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``init`` after defaults are filled in. Equal settings mean the same handle.

    ``half_table`` has the rules inside the models that `initialize` casts to half; None where it casts none.
    """

    device_type: str
    dtype: torch.dtype
    table: CastTable
    loss_scale: Any = None
    enable_caching: bool = True
    verbose: bool = False
    allow_banned: bool = True
    rebind: bool = True
    scope: str = "global"
    trace_overflow: bool = False
    capsule: str | Path | None = None
    on_nonfinite: OnNonfinite = "warn"
    opt_level: str | None = None
    half_table: CastTable | None = None

    @classmethod
    def from_arguments(
        cls, lists: Any = None, device_type: str | None = None, dtype: torch.dtype | str | None = None, **others: Any
    ) -> Settings:
        """Fill in the defaults, read the lists and check the arguments, which are those of `init`. Nothing is patched.

        Raises:
            ListFileError: A list cannot be used.
            UsageError: An argument is wrong.
            LossScaleError: The loss scale is no scale.
        """
        device_type = device_type_of(device_type)
        dtype = half_dtype(dtype) or default_half_dtype(device_type)
        table = load_table(lists, base="bf16" if dtype is torch.bfloat16 else "default", device_type=device_type)
        check_module_rules(table.modules)
        settings = cls(device_type, dtype, table, **others)
        if settings.capsule is not None:
            settings = replace(settings, trace_overflow=True)
        if settings.scope not in ("global", "modules"):
            raise UsageError(f"scope={settings.scope!r} is unknown; choose 'global' or 'modules'")
        if settings.on_nonfinite not in ("warn", "raise", "skip"):
            raise UsageError(f"on_nonfinite={settings.on_nonfinite!r} is unknown; choose 'warn', 'raise', 'skip'")
        make_scaler(settings.loss_scale, dtype)
        return settings

    def covers(self, asked: Settings) -> bool:
        """Whether these settings have what others ask for: dtype, device type, lists, and all that is no default."""
        wanted = {field.name: getattr(asked, field.name) for field in fields(asked)}
        defaults = {field.name: field.default for field in fields(asked)}
        return all(value == defaults[name] or value == getattr(self, name) for name, value in wanted.items())

    @property
    def rules_in_force(self) -> CastTable:
        """The handle's own rules; those inside half models where it has none."""
        return self.half_table if self.half_table is not None and not self.table.rules else self.table

    def facts(self) -> dict[str, str]:
        """Return what ranks that train together have to have alike, by name."""
        # trace_overflow: each rank locates its own overflows alone.
        names = ("opt_level", "device_type", "scope", "enable_caching", "trace_overflow", "on_nonfinite")
        return {
            "the version of autoamp": versions()["autoamp"],
            "the version of torch": torch.__version__,
            "the half dtype": str(self.dtype),
            **{name: str(getattr(self, name)) for name in names},
        }

    def rules(self) -> dict[str, str]:
        """Return the policy of each listed op and the precision of each listed module."""
        modules = {f"[modules] {rule.pattern}": rule.precision.value for rule in self.table.modules}
        of_half_models = () if self.half_table is None else self.half_table.rules
        within = {f"inside half models {rule.target}": rule.policy.value for rule in of_half_models}
        return {**{rule.target: rule.policy.value for rule in self.table.rules}, **within, **modules}


def versions() -> dict[str, str]:
    """Return the versions of autoamp, torch and Python."""
    ours = str(getattr(sys.modules.get("autoamp"), "__version__", "unknown"))
    return {"autoamp": ours, "torch": str(torch.__version__), "python": platform.python_version()}


def device_type_of(device: Any = None) -> str:
    """Return the type of a device or of its name; the current accelerator's for None.

    Raises:
        UsageError: Torch knows no such device.
    """
    try:
        return default_device_type() if device is None else str(torch.device(device).type)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"device_type={device!r} is unknown to torch; choose 'cuda', 'cpu', 'xpu' or 'mps', for example"
        ) from None


def check_device(device_type: str) -> None:
    """Raise UsageError for a type of accelerator that is not there: nothing would ever be cast."""
    built = getattr(torch.accelerator.current_accelerator(), "type", None) == device_type
    # Not is_available(), which fixes which GPUs a process and its forks see.
    found = torch.cuda.device_count() > 0 if device_type == "cuda" else built
    if device_type in ("cuda", "xpu", "mps") and not found:
        why = "none is visible" if built else f"torch {torch.__version__} was built without it"
        raise UsageError(
            f"device_type={device_type!r}: there is no {device_type.upper()} device here, as {why}; choose "
            "device_type='cpu', or leave it out"
        )
