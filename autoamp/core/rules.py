"""The outcome of reading lists: policies, rules with their origin, and the table of all rules. Reads no files."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


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
