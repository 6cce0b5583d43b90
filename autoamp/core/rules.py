"""The content of one list as rules: policies, rules with their origin, the table of all rules.

Keys, entries and limits are checked, and errors name the line: `tomllib` reads the values of a file, and `TomlLines`
finds the line of each key and string. No other file is read here.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from autoamp.errors import ListFileError


class CastPolicy(enum.Enum):
    """What happens to the arguments of one op.

    `FP16` casts them to the half dtype in use, which may be bf16; `FP32` to fp32; `PROMOTE` to the widest dtype among
    them. `HALF_IF_MIXED` casts them to half if they mix half and fp32 and torch refuses that; `FP32_IF_REFUSED` to
    fp32 if torch refuses the call in half. `BANNED` runs the op in fp32 with a warning, or raises for half arguments
    with ``allow_banned=False``. `NONE` does not patch the op.
    """

    FP16 = "fp16"
    FP32 = "fp32"
    PROMOTE = "promote"
    HALF_IF_MIXED = "half_if_mixed"
    FP32_IF_REFUSED = "fp32_if_refused"
    BANNED = "banned"
    NONE = "none"


class ModulePrecision(enum.Enum):
    """The precision of a module; `NONE` removes an inherited entry, and ``"half"`` is another word for `FP16`."""

    FP16 = "fp16"
    FP32 = "fp32"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> ModulePrecision | None:
        return cls.FP16 if value == "half" else None


@dataclass(frozen=True, slots=True)
class RuleSource:
    """The place of a rule: `str(origin)` is `lists/default.toml:12`, or `lists=` for a list without lines.

    Attributes:
        path: The file, the name of a shipped set's file, or a name such as `lists=` for a list that is not a file.
        line: The 1-based line; None if it is not known.
        shipped: Whether the rule comes from autoamp or another installed package, and not from the user.
    """

    path: str
    line: int | None
    shipped: bool

    def __str__(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class CastRule:
    """A target and its policy.

    Attributes:
        target: A bare op name, or the dotted name of one function or method.
        policy: What happens to its arguments.
        origin: The file and line of the rule.
        remedy: The text of a `[banned]` entry, empty otherwise.
        reason: The comment on the entry's line, or the key of its array in a `[none]` table; else empty.
        versions: The torch releases that have the target, such as `>=2.13`; empty for all.
        devices: The device types to which the rule applies, such as `("cpu",)`; empty for all.
    """

    target: str
    policy: CastPolicy
    origin: RuleSource
    remedy: str = ""
    reason: str = ""
    versions: str = ""
    devices: tuple[str, ...] = ()

    @property
    def bare(self) -> bool:
        """True for a bare op name (every public spelling), False for a dotted target (that one alone)."""
        return "." not in self.target


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """The precision of modules, selected by their path in a model or by their class.

    Attributes:
        pattern: A pattern of paths such as `encoder.layers.0.*`, or the dotted name of a class.
        precision: Their precision.
        origin: The file and line of the rule.
        reason: The comment on the entry's line; else empty.
    """

    pattern: str
    precision: ModulePrecision
    origin: RuleSource
    reason: str = ""


@dataclass(frozen=True)
class CastTable:
    """All rules, weakest first: if two rules cover one function, the later one applies.

    A rule of `CastPolicy.NONE` stays in the table, because it overrides weaker rules for the same function.

    Attributes:
        rules: The rules of ops, each target once.
        modules: The rules of modules, each pattern once.
        sources: The names of the lists that were read, in the order in which they were laid over each other.
    """

    rules: tuple[CastRule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()
    sources: tuple[str, ...] = ()

    def overlaid(self, other: CastTable) -> CastTable:
        """Return this table with `other` laid over it: a target of both has the rule, and the place, of `other`."""
        targets, patterns = {rule.target for rule in other.rules}, {rule.pattern for rule in other.modules}
        return CastTable(
            (*(rule for rule in self.rules if rule.target not in targets), *other.rules),
            (*(rule for rule in self.modules if rule.pattern not in patterns), *other.modules),
            (*(name for name in self.sources if name not in other.sources), *other.sources),
        )

    def policy_of(self, target: str) -> CastRule | None:
        """Return the rule written for exactly this target, or None. A bare name is not matched to a dotted one."""
        return next((rule for rule in reversed(self.rules) if rule.target == target), None)


@functools.cache
def admits_version(limits: str, version: str) -> bool:
    """Whether a version such as `2.13.0+cpu` is within limits, of which an empty text has none.

    Raises:
        ValueError: The version does not begin with two numbers.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"version={version!r} does not begin with two numbers, such as '2.13'")
    major_minor = (int(found[1]), int(found[2]))
    return all(
        (major_minor >= (int(major), int(minor))) is (sign == ">=")
        for sign, major, minor in re.findall(r"(>=|<)(\d+)\.(\d+)", limits)
    )


_TOKEN = re.compile(
    r"""(?P<text>\"{3}(?:[^\\]|\\.)*?\"{3,5}|'{3}.*?'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')
      |(?P<mark>[\[\]{}=,.\n])|(?P<word>[^\s\[\]{}=,."'\#]+)|(?P<comment>\#[^\n]*)""",
    re.VERBOSE | re.DOTALL,
)
# Limits of versions: `>=2.13`, `<2.14`, or several with commas between.
_VERSIONS = re.compile(r"(?:>=|<)\d+\.\d+(?:,\s*(?:>=|<)\d+\.\d+)*")

SCHEMA = 1
# Written down here, since lists are read without importing torch.
DEVICE_TYPES = frozenset({"cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "npu", "xla", "xpu"})

# Another word for "fp16", which means the half dtype in use, be it fp16 or bf16.
_HALF = "half"
_ARRAYS = (
    *((policy.value, policy) for policy in CastPolicy if policy is not CastPolicy.BANNED),
    (_HALF, CastPolicy.FP16),
)
_PRECISIONS = (*(precision.value for precision in ModulePrecision), _HALF)
# What people write for a key or precision, with the word that is meant.
_OTHER_WORDS = {
    "float": "fp32", "float32": "fp32", "float16": _HALF, "bf16": _HALF, "bfloat16": _HALF,
}  # fmt: skip
_KEYS = ("schema", "extends", *(policy.value for policy in CastPolicy), _HALF, "modules", "versions", "devices")


def did_you_mean(word: object, valid: Collection[str]) -> str:
    """Return the end of a message about an unknown word: the valid words that are spelled most like it."""
    meant = _OTHER_WORDS.get(str(word))
    close = [meant] if meant in valid else difflib.get_close_matches(str(word), sorted(valid), n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "nothing near that name is known."


def choices(valid: Collection[str]) -> str:
    """Return words as a message lists them."""
    return ", ".join(map(repr, valid))


def fail(origin: RuleSource, message: str) -> NoReturn:
    """Raise the ListFileError for what stands at ``origin``."""
    raise ListFileError(message, origin.path, origin.line)


class TomlLines:
    """The lines of a TOML text that `tomllib` has accepted. All lines are 1-based.

    Attributes:
        keys: The line of each key or table, by its path.
        items: The lines of the strings of each array, by its path.
        comments: The comment at the end of each line that has one, or on a line of its own, without its ``#``.
    """

    def __init__(self, text: str) -> None:
        self.keys: dict[tuple[str, ...], int] = {}
        self.items: dict[tuple[str, ...], list[int]] = {}
        self.comments: dict[int, str] = {}
        # The table that a header has begun, the parts of the key that is read, and the path of its value.
        table: tuple[str, ...] = ()
        key: list[str] = []
        path = table
        # The brackets that are open, each with the path of what it contains.
        opened: list[tuple[str, tuple[str, ...]]] = []
        in_key, line, end = True, 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", end, match.start())
            end, token, kind = match.start(), match.group(), match.lastgroup
            bracket, around = opened[-1] if opened else ("", table)
            if kind == "comment":
                self.comments[line] = token.lstrip("#").strip()
            elif in_key and kind != "mark":
                key.append(str(tomllib.loads(f"key = {token}")["key"]) if kind == "text" else token)
            elif in_key and (token == "=" or (token == "]" and key)):
                path = around if token == "=" else ()
                for part in key:
                    path = (*path, part)
                    self.keys.setdefault(path, line)
                table, key, in_key = path if token == "]" else table, [], token == "]"
            elif in_key and token != "}":
                continue
            elif kind == "text" and bracket == "[":
                self.items.setdefault(around, []).append(line)
            elif token in ("[", "{"):
                opened.append((token, around if bracket == "[" else path))
                in_key = token == "{"
            elif token in ("]", "}"):
                opened.pop()
                in_key = False
            elif (token == "," and bracket == "{") or (token == "\n" and not bracket):
                in_key = True


def parse_toml(raw: bytes, name: str) -> tuple[dict[str, Any], TomlLines]:
    """Return the content of a TOML file, and the lines of its keys and strings.

    Raises:
        ListFileError: The bytes are not UTF-8, not TOML, or nested too deep to read.
    """
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
        return tomllib.loads(text), TomlLines(text)
    except UnicodeDecodeError as error:
        raise ListFileError(f"not UTF-8: {error.reason}", name, raw.count(b"\n", 0, error.start) + 1) from error
    except (ValueError, RecursionError) as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1 if "end of document" in str(error) else None
        message = f'not valid TOML: {error}; names are in quotes, as in fp32 = ["softmax"]'
        raise ListFileError(message, name, line) from error


@dataclass(frozen=True, slots=True)
class Source:
    """Where a list set was read from.

    Attributes:
        name: The file, or a name such as `lists=` for what is no file.
        folder: The folder where the list's relative paths start.
        shipped: Whether it comes with the package.
        lines: The lines of its keys and strings; None where it has none.
        under: The path of the table that it is within a file of others, such as `("tool", "autoamp")`.
    """

    name: str
    folder: Path
    shipped: bool = False
    lines: TomlLines | None = None
    under: tuple[str, ...] = ()

    def at(self, *path: str, item: int | None = None) -> RuleSource:
        """Return the origin of a key, or of an item of its array."""
        line, path = None, self.under + path
        if self.lines:
            items = self.lines.items.get(path, [])
            line = items[item] if item is not None and item < len(items) else self.lines.keys.get(path)
        return RuleSource(self.name, line, self.shipped)

    def remark(self, origin: RuleSource) -> str:
        """Return the comment on the line of an entry, empty where there is none."""
        return self.lines.comments.get(origin.line, "") if self.lines and origin.line is not None else ""


class ListSet:
    """One list set, checked while it is made.

    Attributes:
        source: Where it was read from.
        own: Its own rules, bare names before dotted ones.
        extends: The sets that it extends; None where it does not say.
        lists: The sets and files that a pyproject's table names beside its own rules.

    Raises:
        ListFileError: For whatever is wrong in the list, with its line.
    """

    def __init__(self, source: Source, data: Mapping[str, object], *, schema_needed: bool = False) -> None:
        self.source = source
        valid = (*_KEYS, "lists") if source.under else _KEYS
        for key in data:
            if key not in valid:
                fail(source.at(str(key)), f"unknown key {key!r}; {did_you_mean(key, valid)} Valid: {choices(valid)}")
        schema = data.get("schema", None if schema_needed else SCHEMA)
        if type(schema) is not int or schema != SCHEMA:
            unknown = f"schema={schema!r} ({type(schema).__name__}) is unknown; this version reads 'schema = {SCHEMA}'"
            missing = f"the key 'schema' is missing; begin the file with 'schema = {SCHEMA}'"
            fail(source.at("schema"), unknown if "schema" in data else missing)
        self._seen: dict[str, CastRule] = {}
        for rule in self._rules(data):
            target, policy, origin = rule.target, rule.policy, rule.origin
            if not all(part.isidentifier() for part in target.split(".")):
                remedy = "write a bare op name such as 'softmax', or a dotted name such as 'mypkg.losses.focal_loss'"
                fail(origin, f"{target!r} under {policy.value} is not an op name; {remedy}")
            if (first := self._seen.get(target)) is not None:
                both = f"{first.policy.value} ({first.origin}) and again under {policy.value} ({origin})"
                fail(origin, f"{target!r} is under {both}; an op has one policy: remove one of these entries")
            self._seen[target] = rule
        for target, versions, origin in self._limits(data, "versions"):
            if not _VERSIONS.fullmatch(versions):
                fail(origin, f"{target!r} under versions has {versions!r}; write '>=2.13', '<2.14' or '>=2.12,<2.14'")
            self._seen[target] = replace(self._seen[target], versions=versions)
        for target, devices, origin in self._limits(data, "devices"):
            types = tuple(part.strip() for part in devices.split(","))
            if not DEVICE_TYPES.issuperset(types):
                remedy = f"write one of {choices(sorted(DEVICE_TYPES))}, or several with commas between"
                fail(origin, f"{target!r} under devices has {devices!r}; {remedy}")
            self._seen[target] = replace(self._seen[target], devices=types)
        rules = sorted(self._seen.values(), key=lambda rule: not rule.bare)
        self.own = CastTable(tuple(rules), tuple(self._module_rules(data)), (source.name,))
        self.extends = self._strings(data, "extends", lone=True) if "extends" in data else None
        self.lists = self._strings(data, "lists", lone=True)

    def _strings(
        self, data: Mapping[str, object], key: str, *, lone: bool = False, above: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        """Return an array of strings; with ``lone`` a single string will do. ``above`` is the path of the table."""
        value = data.get(key, [])
        items: Collection[Any] = value if isinstance(value, list | tuple) else [value]
        wrong = [item for item in items if not isinstance(item, str)] + [value] * (items is not value and not lone)
        if wrong:
            remark = f"{'a string or ' * lone}an array of strings"
            self._fail_type(" ".join((*above, key)), remark, wrong[0], self.source.at(*above, key))
        return tuple(items)

    def _entries(self, data: Mapping[str, object], key: str) -> Iterator[tuple[str, str]]:
        """Yield the names and strings of a table."""
        table = data.get(key, {})
        if not isinstance(table, Mapping):
            self._fail_type(key, "a table", table, self.source.at(key))
        for name, value in table.items():
            if not isinstance(name, str) or not isinstance(value, str):
                remark = "a string; a name with a dot must be in quotes"
                wrong = value if isinstance(name, str) else name
                self._fail_type(f"{key} {name!r}", remark, wrong, self.source.at(key, str(name)))
            yield name, value

    def _rules(self, data: Mapping[str, object]) -> Iterator[CastRule]:
        """Yield the rules of the arrays, of a `[none]` table and of `[banned]`."""
        at, remark = self.source.at, self.source.remark
        for key, policy in _ARRAYS:
            table = data.get(key)
            if policy is not CastPolicy.NONE or not isinstance(table, Mapping):
                for item, target in enumerate(self._strings(data, key)):
                    origin = at(key, item=item)
                    yield CastRule(target, policy, origin, reason=remark(origin))
                continue
            # It has an array of names for each class of reason.
            for reason, names in table.items():
                if not isinstance(reason, str) or not isinstance(names, list | tuple):
                    wanted = "an array of names, with the reason as its key"
                    self._fail_type(f"none {reason!r}", wanted, names, at("none", str(reason)))
                for item, target in enumerate(self._strings(table, reason, above=("none",))):
                    yield CastRule(target, policy, at("none", reason, item=item), reason=reason)
        for target, remedy in self._entries(data, "banned"):
            origin = at("banned", target)
            yield CastRule(target, CastPolicy.BANNED, origin, remedy, remark(origin))

    def _limits(self, data: Mapping[str, object], key: str) -> Iterator[tuple[str, str, RuleSource]]:
        """Yield the entries of the table `[versions]` or `[devices]`, whose names have rules, and where they stand."""
        for target, limit in self._entries(data, key):
            origin = self.source.at(key, target)
            if target not in self._seen:
                fail(origin, f"{target!r} under {key} has no rule here; {did_you_mean(target, self._seen)}")
            yield target, limit, origin

    def _fail_type(self, key: str, wanted: str, value: object, origin: RuleSource) -> NoReturn:
        fail(origin, f"{key} must be {wanted}; got {value!r} ({type(value).__name__})")

    def _module_rules(self, data: Mapping[str, object]) -> Iterator[ModuleRule]:
        """Yield the rules of the `[modules]` table."""
        for pattern, value in self._entries(data, "modules"):
            origin = self.source.at("modules", pattern)
            if pattern.split() != [pattern]:
                remark = "write a path such as 'encoder.layers.0.*', or a class such as 'torch.nn.BatchNorm2d'"
                fail(origin, f"{pattern!r} under modules is not a path or class; {remark}")
            if value not in _PRECISIONS:
                meant = did_you_mean(value, _PRECISIONS)
                fail(origin, f"{pattern!r} under modules has {value!r}; {meant} Choose {choices(_PRECISIONS)}")
            yield ModuleRule(pattern, ModulePrecision(value), origin, self.source.remark(origin))
