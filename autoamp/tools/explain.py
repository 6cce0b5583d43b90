"""Which rule applies to an op, and where it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from autoamp.core import CastRule, CastTable, did_you_mean, expand, known_ops, located
from autoamp.errors import UsageError

_MEANINGS = {
    "fp16": "its arguments are cast to the half dtype",
    "fp32": "its arguments are cast to fp32",
    "promote": "arguments of several dtypes are cast to fp32",
    "half_if_mixed": "where torch refuses several dtypes, its arguments are cast to the half dtype",
    "fp32_if_refused": "where torch refuses half precision, its arguments are cast to fp32",
    "banned": "in half precision it runs in fp32 and warns once, or raises an error with allow_banned=False",
    "none": "left alone",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a table of rules says of a name; ``str()`` is for people.

    Attributes:
        name: What was asked for.
        rules: The rules that apply, each with the functions that it patches, by name; empty for an op on no list.
    """

    name: str
    rules: tuple[tuple[CastRule, tuple[str, ...]], ...]

    def __str__(self) -> str:
        if not self.rules:
            return f"{self.name}: on no list; its arguments are left as they are, and torch promotes mixed dtypes"
        lines = []
        for rule, names in self.rules:
            notes = "".join(f"; {note}" for note in (rule.reason, rule.remedy) if note)
            lines.append(
                f"{self.name}: {rule.policy.value} ({_MEANINGS[rule.policy.value]}), by {rule.target!r} "
                f"in {located(rule.origin)}{notes}"
            )
            lines += [f"    {name}" for name in names]
        return "\n".join(lines)


def explain(table: CastTable, name: str) -> Explanation:
    """Tell which rules of a table apply to a name.

    Args:
        table: The rules in force.
        name: An op such as ``"softmax"`` or ``"exp_"``, or a dotted name such as ``"torch.nn.functional.softmax"``.

    Raises:
        UsageError: Torch has no op of this name, and no rule is on it.
    """
    expansion = expand(table)
    found: dict[CastRule, list[str]] = {}
    for target in expansion.targets:
        names = (target.name,) if "." in name else (target.attribute, target.name, target.rule.target)
        if name in names:
            written = table.policy_of(target.rule.target) or target.rule
            # An in-place form may go by another policy than the rule says for the op itself.
            rule = target.rule if target.rule.policy is not written.policy else written
            found.setdefault(rule, []).append(target.name)
    for rule in (*expansion.deferred, *(rule for rule in table.rules if not found)):
        if rule.target == name:
            found.setdefault(rule, [])
    if not found and name.rpartition(".")[2] not in known_ops():
        kind = getattr(torch.nn, name.rpartition(".")[2], None)
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            # As its function is spelled: CrossEntropyLoss, cross_entropy_loss.
            op = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
            hint = (
                f"{did_you_mean(op, [op] if op in known_ops() else known_ops())} Rules for modules are under [modules]"
            )
            raise UsageError(f"{name!r} is a class of modules: give the op that it calls; {hint}")
        hint = f"{did_you_mean(name, known_ops())} Give the name of an op, such as 'softmax'"
        raise UsageError(f"{name!r} is no op of torch, and no rule is on it; {hint}")
    return Explanation(name, tuple((rule, tuple(names)) for rule, names in found.items()))
