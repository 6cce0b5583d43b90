"""The cost model: from a survey to the changes of a list that promise something, each with its reason and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoamp.diagnostics import spellings
from autoamp.tuning.costs import Cost, Survey, Use

__all__ = ["Proposal", "proposals_of", "speed_of"]

# Times that differ by less tell nothing.
NOISE = 0.03
# Ops below this part of a step's time, and of the bytes it keeps, are left as they are, but for unsafe ones.
SMALL = 0.005
# An op that keeps less than this part of the bytes it would in fp32 pays by memory,
MEMORY = 0.75
# unless it takes this much longer, or this is all that a step spares.
SLOWER = 1.1
FEW_BYTES = 2**20


@dataclass(frozen=True)
class Proposal:
    """A change of the list.

    Attributes:
        name: An op as a list names it, or the dotted name of a module's class.
        value: The policy, or the precision of the class.
        kind: ``"unsafe"``, ``"unprofitable"``, ``"profitable"`` or ``"memory"``.
        reason: Why, with figures.
        gain: Predicted seconds a step.
        of_module: Whether this is an entry under ``[modules]``.
        firm: Whether the model is sure, so that it is tried together with the others.
        otherwise: What to try where the program fails with ``value``.
    """

    name: str
    value: str
    kind: str
    reason: str
    gain: float = 0.0
    of_module: bool = False
    firm: bool = True
    otherwise: tuple[str, ...] = ()

    def as_value(self, value: str) -> Proposal:
        """Return this proposal with another policy."""
        return replace(self, value=value)


def speed_of(survey: Survey) -> float | None:
    """Return how long the ops that run in half precision now take of their time in fp32, casts apart, by the model."""
    uses = [use for use in survey.uses if use.policy == "fp16"]
    full, half = _sum(uses, "fp32"), _sum(uses, "half")
    if full is None or half is None:
        return None
    return half.seconds / full.seconds if full.seconds else 1.0


def proposals_of(survey: Survey, *, max_error: float = 0.05) -> tuple[Proposal, ...]:
    """Return what to change: unsafe ops first, then by predicted gain.

    Args:
        survey: What was found.
        max_error: An op whose relative error in half is larger than this is unsafe.
    """
    by_target: dict[str, list[Use]] = {}
    for use in survey.uses:
        by_target.setdefault(use.target, []).append(use)
    all_seconds = sum(_seconds(use) for use in survey.uses)
    all_bytes = sum(_bytes(use) for use in survey.uses)
    found = []
    for target, uses in by_target.items():
        bad = [use for use in uses if _unsafe(use, max_error)]
        if bad:
            if any(use.policy != "fp32" for use in bad):
                found += _safe_again(target, uses, bad, survey, max_error)
            continue
        small = sum(map(_seconds, uses)) < SMALL * all_seconds and sum(map(_bytes, uses)) <= SMALL * all_bytes
        if not small and (proposal := _paying(target, uses, survey, all_bytes)) is not None:
            found.append(proposal)
    found.sort(key=lambda one: (one.kind != "unsafe", not one.firm, -one.gain, one.name))
    return _one_for_each_name(found)


def _one_for_each_name(proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """Return the first proposal of each name, since a list has a name once. Of unsafe ops it has all reasons."""
    found: dict[tuple[str, bool], Proposal] = {}
    for one in proposals:
        key = one.name, one.of_module
        known = found.setdefault(key, one)
        if known is not one and known.kind == one.kind:
            found[key] = replace(known, reason=f"{known.reason}; {one.reason}")
    return tuple(found.values())


def _unsafe(use: Use, max_error: float) -> bool:
    # What no list casts has the error of its arguments anyway.
    cast = use.policy in ("fp16", "fp32")
    return use.overflow > 0 or (cast and use.error is not None and not use.error <= max_error)


def _safe_again(
    target: str, uses: Sequence[Use], bad: Sequence[Use], survey: Survey, max_error: float
) -> list[Proposal]:
    """Return what puts an unsafe op into fp32: by the classes of modules where it alone is unsafe, else everywhere."""
    reason = _why_unsafe(bad, survey, max_error)
    good = [use for use in uses if use not in bad]
    classes = sorted({use.module_class or "" for use in bad})
    pays = sum(_saved(use) for use in good) > 0
    of_classes = all(name and not name.startswith("torch.") for name in classes)
    apart = not any(use.module_class in classes for use in good)
    if all(use.policy == "unlisted" for use in uses):
        # In half it costs nothing elsewhere. The classes are to be of such ops alone, which lose nothing in fp32.
        pays = not any(_saved(use) > 0 for use in survey.uses if use.module_class in classes)
    if of_classes and apart and good and pays:
        where = f"{_short(target)} is unsafe in this class, and pays elsewhere: {reason}"
        return [Proposal(name, "fp32", "unsafe", where, of_module=True) for name in classes]
    # Of an op on no list it is not known by which of its names it was called.
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


def _paying(target: str, uses: Sequence[Use], survey: Survey, all_bytes: float) -> Proposal | None:
    full, half, with_casts, widened = (_sum(uses, variant) for variant in ("fp32", "half", "half_cast", "fp32_cast"))
    if full is None:
        return None
    policies = {use.policy for use in uses}
    if policies == {"fp16"}:
        return _unprofitable(target, full, half, with_casts, survey)
    if policies == {"fp32"} and half is not None and with_casts is not None and widened is not None:
        if any(use.error is None for use in uses):
            return None
        return _profitable(target, (full, half, with_casts, widened), uses, survey, all_bytes)
    return None


def _unprofitable(
    target: str, full: Cost, half: Cost | None, with_casts: Cost | None, survey: Survey
) -> Proposal | None:
    if half is None or with_casts is None:
        reason = f"it cannot be run in {survey.dtype} on {survey.device_type}"
        return Proposal(target, "none", "unprofitable", reason, 0.0, otherwise=("fp32",))
    figures = _times(survey, ("fp32", full), (survey.dtype, half), ("with casts", with_casts))
    if half.seconds >= full.seconds * (1 - NOISE):
        reason = f"does not pay on {survey.device_type}: {figures}"
    elif with_casts.seconds >= full.seconds * (1 + NOISE):
        reason = f"pays only if its arguments are in half precision: {figures}"
    else:
        return None
    gain = (with_casts.seconds - full.seconds) / survey.steps
    firm = half.seconds >= full.seconds * (1 - NOISE)
    return Proposal(target, "none", "unprofitable", reason, gain, firm=firm, otherwise=("fp32",))


def _profitable(
    target: str, costs: tuple[Cost, Cost, Cost, Cost], uses: Sequence[Use], survey: Survey, all_bytes: float
) -> Proposal | None:
    full, half, with_casts, widened = costs
    error = max(use.error or 0.0 for use in uses)
    safe = f"no overflow, relative error {error:.2g}"
    figures = _times(survey, ("fp32", full), ("of half arguments", widened), (survey.dtype, half))
    gain = (widened.seconds - half.seconds) / survey.steps
    spared = widened.bytes - half.bytes
    worth = spared > max(SMALL * all_bytes, FEW_BYTES * survey.steps)
    if worth and half.bytes < MEMORY * widened.bytes and half.seconds < SLOWER * widened.seconds:
        kept = f"keeps {_kib(half.bytes / survey.steps)} a step instead of {_kib(widened.bytes / survey.steps)}"
        return Proposal(target, "fp16", "memory", f"{kept} if arguments are in half precision; {safe}; {figures}", gain)
    if half.seconds >= widened.seconds * (1 - NOISE):
        return None
    firm = with_casts.seconds < full.seconds * (1 - NOISE)
    return Proposal(target, "fp16", "profitable", f"{figures}; {safe}", gain, firm=firm)


def _sum(uses: Iterable[Use], variant: str) -> Cost | None:
    """Return the cost of all uses; None where one of those that were timed has no such variant, or none was timed."""
    timed = [use.total(variant) for use in uses if use.costs is not None]
    if not timed or any(cost is None for cost in timed):
        return None
    found = [cost for cost in timed if cost is not None]
    return Cost(sum(cost.seconds for cost in found), sum(cost.bytes for cost in found))


def _saved(use: Use) -> float:
    full, half = use.total("fp32"), use.total("half")
    return 0.0 if full is None or half is None else full.seconds - half.seconds


def _seconds(use: Use) -> float:
    cost = use.total("fp32")
    return 0.0 if cost is None else cost.seconds


def _bytes(use: Use) -> float:
    cost = use.total("fp32")
    return 0.0 if cost is None else cost.bytes


def _times(survey: Survey, *named: tuple[str, Cost]) -> str:
    return ", ".join(f"{name} {1e6 * cost.seconds / survey.steps:,.0f} us" for name, cost in named) + " a step"


def _kib(size: float) -> str:
    return f"{size / 1024:,.0f} KiB"


def _short(target: str) -> str:
    return target.rpartition(".")[2]
