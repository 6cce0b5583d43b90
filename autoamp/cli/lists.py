"""`autoamp lists`: each rule with its reason and origin."""

from __future__ import annotations

import argparse
import sys

from autoamp.cli.output import aligned
from autoamp.core import CastPolicy, CastRule, CastTable, RuleSource, Settings, expand, package_tables
from autoamp.errors import UsageError
from autoamp.half_units import HALF_NAMES
from autoamp.tools import explain


def lists(chosen: argparse.Namespace) -> int:
    """Print the rules of this project, or those for some ops. Returns the exit code."""
    settings = Settings.from_arguments(chosen.lists, chosen.device_type, chosen.dtype)
    table = settings.table
    if chosen.ops:
        sys.stdout.write("".join(f"{explain(table, _checked(name, table))}\n" for name in chosen.ops))
        return 0
    expand(table)  # refuses unknown names
    order = [CastPolicy.FP16, CastPolicy.FP32, CastPolicy.PROMOTE, CastPolicy.BANNED, CastPolicy.NONE]
    shown = (rule for rule in table.rules if not _is_no_op(rule))
    rules = sorted(shown, key=lambda rule: (order.index(rule.policy), rule.target))
    sys.stdout.write("".join(f"{line}\n" for line in _lines(table, rules, HALF_NAMES[settings.dtype])))
    return 0


def _lines(table: CastTable, rules: list[CastRule], half: str) -> list[str]:
    """Return the rules, and those of modules under a heading of their own. ``half`` stands for ``fp16``."""
    words = {"fp16": half}

    def row(name: str, value: str, origin: RuleSource) -> tuple[str, str, str]:
        return name, words.get(value, value), str(origin)

    lines = aligned([row(rule.target, rule.policy.value, rule.origin) for rule in rules]) if rules else []
    if table.modules:
        lines += [*([""] if lines else []), "[modules]"]
        lines += aligned([row(rule.pattern, rule.precision.value, rule.origin) for rule in table.modules])
    shipped = [(one.owner, str(one.file)) for one, _ in package_tables() if str(one.file) in table.sources]
    if shipped:
        lines += ["", "[lists of packages]", *aligned(shipped)]
    return lines


def _is_no_op(rule: CastRule) -> bool:
    """Whether a rule is for a name of torch that is no op. Such rules let the tests find new names."""
    # The class of reason, in the shipped sets, of names in torch's namespaces that are no ops.
    return rule.origin.shipped and rule.reason.startswith("computes nothing")


def _checked(name: str, table: CastTable) -> str:
    """Return the name of an op. UsageError: it is Python's own, such as ``__dir__``, or a type such as ``Optional``."""
    plain = name.rpartition(".")[2]
    rule = table.policy_of(plain)
    if rule is not None and _is_no_op(rule) and (plain.startswith("__") or plain[:1].isupper()):
        raise UsageError(f"{name!r} is a name of torch, but not an op; give a name such as 'softmax'")
    return name
