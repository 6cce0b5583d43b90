"""From a survey to the list changes to try, each with its reason and figures; changes as the text of a list file."""

from __future__ import annotations

import json
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoamp.tools import spellings

VARIANTS = ("fp32", "half", "half_cast")
"""How an op is timed: in fp32; in half; in half on fp32 arguments, its result cast back."""

# A smaller difference of two times means nothing.
NOISE = 0.03
# Ops below this part of a step's time are left as they are, unless they are unsafe.
SMALL = 0.005


@dataclass
class Use:
    """The calls of one op at one place with arguments of the same shapes.

    Attributes:
        target: How a list names the op.
        policy: The policy in force, ``"unlisted"`` if there is none.
        module_class: The dotted name of the innermost module's class, None outside of modules.
        location: ``"file:line"`` of the call.
        module: The path of the innermost module in the outermost one; None if it has modules within, and outside of
            modules.
        calls: How often it was called while the survey ran.
        seconds: The time of a call by `VARIANTS`, with its backward pass if gradients are recorded; a variant is absent
            if it cannot be run. Empty if nothing was timed.
        overflow: How many of its arguments and results overflow in the half dtype.
        largest: The largest binary exponent of these, None if all are 0.
        error: The largest relative error of its operators in the half dtype; None if that is unknown.
    """

    target: str
    policy: str
    module_class: str | None = None
    location: str | None = None
    module: str | None = None
    calls: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    overflow: int = 0
    largest: int | None = None
    error: float | None = None

    def total(self, variant: str) -> float | None:
        """Return the seconds of all calls; None if this variant was not timed."""
        return self.seconds[variant] * self.calls if variant in self.seconds else None


@dataclass(frozen=True)
class Survey:
    """All uses of a program's ops, as far as it ran.

    Attributes:
        device_type: The device that the program computes on.
        dtype: The half dtype, ``"float16"`` or ``"bfloat16"``.
        steps: How many steps optimizers made meanwhile, at least 1. Times a step are totals divided by this.
        uses: The uses.
        untimed: How many of these there was no time left for.
    """

    device_type: str
    dtype: str
    steps: int = 1
    uses: tuple[Use, ...] = ()
    untimed: int = 0


@dataclass(frozen=True)
class Proposal:
    """A change of the list.

    Attributes:
        name: An op as a list names it, or the dotted name of a module's class.
        value: The policy, or the precision of the class.
        kind: ``"unsafe"``, ``"unprofitable"`` or ``"profitable"``; ``"restores"`` for `Bisection`.
        reason: Why, with figures.
        gain: Predicted seconds a step.
        of_module: Whether this is an entry under ``[modules]``.
    """

    name: str
    value: str
    kind: str
    reason: str
    gain: float = 0.0
    of_module: bool = False


Unit: TypeAlias = tuple[Proposal, ...]
"""The list entries that put one module, or one op under all of its names, into fp32."""


def proposals_of(survey: Survey, *, max_error: float = 0.05) -> tuple[Proposal, ...]:
    """Return the changes to try: unsafe ops first, then by predicted gain.

    Args:
        survey: The survey.
        max_error: An op with a larger relative error in half precision is unsafe.
    """
    by_target: dict[str, list[Use]] = {}
    for use in survey.uses:
        by_target.setdefault(use.target, []).append(use)
    small = SMALL * sum(use.total("fp32") or 0.0 for use in survey.uses)
    found = []
    for target, uses in by_target.items():
        bad = [use for use in uses if _is_unsafe(use, max_error)]
        if any(use.policy != "fp32" for use in bad):
            found += _safe_again(target, uses, bad, survey, max_error)
        elif not bad and sum(use.total("fp32") or 0.0 for use in uses) >= small:
            found += _faster(target, uses, survey)
    found.sort(key=lambda one: (one.kind != "unsafe", -one.gain, one.name))
    # A list has a name once. The entry of several unsafe ops has all their reasons.
    by_name: dict[tuple[str, bool], Proposal] = {}
    for one in found:
        known = by_name.setdefault((one.name, one.of_module), one)
        if known is not one and known.kind == one.kind:
            by_name[one.name, one.of_module] = replace(known, reason=f"{known.reason}; {one.reason}")
    return tuple(by_name.values())


def _is_unsafe(use: Use, max_error: float) -> bool:
    # An op that no list casts has the error of its arguments anyway.
    cast = use.policy in ("fp16", "fp32")
    return use.overflow > 0 or (cast and use.error is not None and not use.error <= max_error)


def _safe_again(
    target: str, uses: Sequence[Use], bad: Sequence[Use], survey: Survey, max_error: float
) -> list[Proposal]:
    """Return entries that put an unsafe op into fp32: module classes if it is unsafe in these alone, else the op."""
    reason = _why_unsafe(bad, survey, max_error)
    good = [use for use in uses if use not in bad]
    classes = sorted({use.module_class or "" for use in bad})
    pays = sum(map(_saved, good)) > 0
    of_classes = all(name and not name.startswith("torch.") for name in classes)
    apart = not any(use.module_class in classes for use in good)
    if all(use.policy == "unlisted" for use in uses):
        # In half precision it costs nothing elsewhere. An op that pays in the same class would lose by fp32.
        pays = not any(_saved(use) > 0 for use in survey.uses if use.module_class in classes)
    if of_classes and apart and good and pays:
        where = f"{target.rpartition('.')[2]} is unsafe in this class, and pays elsewhere: {reason}"
        return [Proposal(name, "fp32", "unsafe", where, of_module=True) for name in classes]
    # The survey does not know by which of its names an unlisted op was called.
    names = spellings(target) if any(use.policy == "unlisted" for use in bad) else ()
    return [Proposal(name, "fp32", "unsafe", reason) for name in names or (target,)]


def _why_unsafe(bad: Sequence[Use], survey: Survey, max_error: float) -> str:
    worst = max(bad, key=lambda use: (use.overflow, use.error or 0.0))
    at = f" at {worst.location}" if worst.location else ""
    if worst.overflow:
        size = "" if worst.largest is None else f", up to 2^{worst.largest + 1}"
        return f"{worst.overflow:,} of its arguments and results overflow in {survey.dtype}{at}{size}"
    error = "inf or nan" if worst.error is None or not math.isfinite(worst.error) else f"{worst.error:.2g}"
    return f"its relative error in {survey.dtype}{at} is {error}, above {max_error:g}"


def _faster(target: str, uses: Sequence[Use], survey: Survey) -> list[Proposal]:
    """Return the change that makes a safe op faster, whether its arguments are in half precision or not."""
    full, half, half_cast = (_seconds_a_step(uses, variant, survey) for variant in VARIANTS)
    policies = {use.policy for use in uses}
    if full is None or policies not in ({"fp16"}, {"fp32"}):
        return []
    if half is None or half_cast is None:
        reason = f"it cannot be run in {survey.dtype} on {survey.device_type}"
        return [Proposal(target, "fp32", "unprofitable", reason)] if policies == {"fp16"} else []
    seconds = {"fp32": full, survey.dtype: half, "with casts": half_cast}
    figures = ", ".join(f"{name} {1e6 * value:,.0f} us" for name, value in seconds.items()) + " a step"
    if policies == {"fp16"} and half >= full * (1 - NOISE):
        reason = f"does not pay on {survey.device_type}: {figures}"
        return [Proposal(target, "fp32", "unprofitable", reason, half_cast - full)]
    errors = [use.error for use in uses if use.error is not None]
    if policies == {"fp32"} and half_cast < full * (1 - NOISE) and len(errors) == len(uses):
        reason = f"{figures}; no overflow, relative error {max(errors):.2g}"
        return [Proposal(target, "fp16", "profitable", reason, full - half_cast)]
    return []


def _seconds_a_step(uses: Iterable[Use], variant: str, survey: Survey) -> float | None:
    """Return the time of all timed uses; None if one of them cannot be run as this variant, or none was timed."""
    totals = [use.total(variant) for use in uses if use.seconds]
    known = [total for total in totals if total is not None]
    return sum(known) / survey.steps if known and len(known) == len(totals) else None


def _saved(use: Use) -> float:
    full, half = use.total("fp32"), use.total("half")
    return 0.0 if full is None or half is None else full - half


def units_of(survey: Survey) -> tuple[Unit, ...]:
    """Return the candidates for fp32: the innermost modules that a program called, and ops called outside of these.

    A module is named by its class if it is the only one of that class, else by its path. Ops that the lists already
    run in fp32 are left out, and unlisted ops that are exact in half precision, such as views. Units with an op that
    overflows come first: another module in fp32 may hide the fault. Of these, and of all others, those come first that
    take the fewest calls away from half precision; an op in fp32 takes away all of its calls, those in modules too.
    """
    paths: defaultdict[str, set[str]] = defaultdict(set)
    for use in survey.uses:
        if use.module is not None and use.module_class is not None:
            paths[use.module_class].add(use.module)
    units: defaultdict[tuple[tuple[str, ...], bool], list[Use]] = defaultdict(list)
    calls_of: Counter[str] = Counter()
    for use in survey.uses:
        calls_of[use.target] += use.calls
        exact = use.policy == "unlisted" and not use.overflow and use.error == 0.0
        if use.policy not in ("fp32", "banned") and not exact:
            units[_entries(use, paths)].append(use)

    def cost(unit: tuple[tuple[str, ...], bool]) -> tuple[bool, int, bool]:
        uses, (_, of_module) = units[unit], unit
        calls = sum(use.calls for use in uses) if of_module else calls_of[uses[0].target]
        return not any(use.overflow for use in uses), calls, of_module

    found = []
    for names, of_module in sorted(units, key=cost):
        # Those that overflow first.
        uses = sorted(units[names, of_module], key=lambda use: not use.overflow)
        different = list(dict.fromkeys(map(_call, uses)))
        reason = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
        found.append(tuple(Proposal(name, "fp32", "restores", reason, of_module=of_module) for name in names))
    return tuple(found)


def _call(use: Use) -> str:
    at = f" at {use.location}" if use.location else ""
    return f"{use.target}{at}{', which overflows' if use.overflow else ''}"


def _entries(use: Use, paths: dict[str, set[str]]) -> tuple[tuple[str, ...], bool]:
    """Return the entries that put a use into fp32, and whether they name a module."""
    if use.module is not None and use.module_class is not None and len(paths[use.module_class]) == 1:
        return (use.module_class,), True
    if use.module:
        return (use.module,), True
    # The survey does not know by which of its names an unlisted op was called.
    return (use.policy == "unlisted" and spellings(use.target)) or (use.target,), False


def list_text(proposals: Sequence[Proposal], extends: Sequence[str] = (), comments: Sequence[str] = ()) -> str:
    """Return a list file with these entries.

    Args:
        proposals: The entries, each with its reason.
        extends: The sets and files that it is based on; none for those that apply anyway.
        comments: Lines for its head.
    """
    lines = [*map(_comment, comments), "schema = 1"]
    if extends:
        lines.append(f"extends = [{', '.join(map(_string, extends))}]")
    ordered = sorted(proposals, key=operator.attrgetter("name"))
    for policy in ("fp16", "fp32"):
        entries = [one for one in ordered if one.value == policy and not one.of_module]
        if entries:
            lines += ["", f"{policy} = [", *(f"    {_string(one.name)},  {_reason(one)}" for one in entries), "]"]
    modules = [one for one in ordered if one.of_module]
    if modules:
        lines += ["", "[modules]"]
        lines += [f"{_string(one.name)} = {_string(one.value)}  {_reason(one)}" for one in modules]
    return "\n".join(lines) + "\n"


def _reason(proposal: Proposal) -> str:
    return _comment(f"{proposal.kind}: {proposal.reason}")


def _comment(text: str) -> str:
    # Control characters are no part of a TOML file.
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text) if text else "#"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
