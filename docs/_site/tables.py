"""What pages have of the code: the table of ops from the shipped lists, the options from the command's parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from autoamp.cli import parser
from autoamp.core import CastPolicy, CastRule, CastTable, shipped_sets, shipped_table
from tests.tools.list_checks import autocast_differences

__all__ = ["autocast", "command_line", "ops", "reason_of"]

# The shipped sets that a handle uses, and where.
_PLACES = {
    "`default`, CUDA": ("default", "cuda"), "`bf16`, CUDA": ("bf16", "cuda"),
    "`default`, CPU": ("default", "cpu"), "`bf16`, CPU": ("bf16", "cpu"),
}  # fmt: skip


def reason_of(rule: CastRule) -> str:
    """Return why a rule of a shipped set is there: the comment beside its entry, or what it stands under.

    Raises:
        ValueError: There is none.
    """
    if not (rule.remedy or rule.reason):
        raise ValueError(f"{rule.origin}: {rule.target!r} has no reason; write one beside it, as a comment")
    return rule.remedy or rule.reason


def ops() -> str:
    """Return the rules of the shipped sets as Markdown: a table for each policy, and the ops that are not cast."""
    default = shipped_table("default")
    others = {name: _own(shipped_table(name), name) for name in shipped_sets() if name != "default"}
    parts = []
    for policy in CastPolicy:
        if policy is not CastPolicy.NONE:
            parts += [f"## {policy.value}", "", *_rows(default, others, policy), ""]
    return "\n".join([*parts, "## Not cast", "", *_left_alone(default)])


def _own(table: CastTable, name: str) -> dict[str, CastRule]:
    """Return the rules of a set itself, without those of the set that it extends."""
    return {rule.target: rule for rule in table.rules if rule.origin.path == f"lists/{name}.toml"}


def _rows(default: CastTable, others: dict[str, dict[str, CastRule]], policy: CastPolicy) -> Iterator[str]:
    yield "| op | why | in other sets |"
    yield "|---|---|---|"
    of_others = {target for rules in others.values() for target, rule in rules.items() if rule.policy is policy}
    rules = {rule.target: rule for rule in default.rules if rule.policy is policy}
    for target in sorted({*rules, *of_others}):
        rule = rules.get(target)
        why = "" if rule is None else _text(reason_of(rule)) + _limits(rule)
        elsewhere = (_elsewhere(name, one[target]) for name, one in others.items() if target in one)
        yield f"| `{target}` | {why} | {'; '.join(elsewhere)} |"


def _elsewhere(name: str, rule: CastRule) -> str:
    return f"`{name}`: {rule.policy.value}{_limits(rule)}, {_text(reason_of(rule))}"


def _limits(rule: CastRule) -> str:
    """Return where a rule holds, if not everywhere."""
    limits = [f"torch {rule.versions}"] if rule.versions else []
    limits += [f"on {', '.join(rule.devices)}"] if rule.devices else []
    return f" ({'; '.join(limits)})" if limits else ""


def _left_alone(default: CastTable) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for rule in default.rules:
        if rule.policy is CastPolicy.NONE:
            reasons.setdefault(rule.reason, []).append(rule.target)
    for reason, targets in sorted(reasons.items()):
        yield f"**{reason[0].upper()}{reason[1:]}**: {', '.join(f'`{target}`' for target in sorted(targets))}."
        yield ""


def _text(text: str) -> str:
    """Return a text as a cell of a table takes it, its names as code."""
    text = re.sub(r"(?<![`\w])((?:torch\.[\w.]+)|\w*_\w+\*?)(?![`\w])", r"`\1`", text)
    return text.replace("|", "\\|").replace("@", "`@`").replace(" ** ", " `**` ")


def autocast() -> str:
    """Return the differences of the shipped sets from the installed torch's autocast as a table in Markdown."""
    places: dict[tuple[str, str, str, str], list[str]] = {}
    for place, (name, device_type) in _PLACES.items():
        for one in autocast_differences(shipped_table(name, device_type), device_type) or ():
            reason = "" if one.rule is None else reason_of(one.rule)
            places.setdefault((one.in_torch.value, one.here.value, reason, one.op), []).append(place)
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for (in_torch, here, reason, op), found in sorted(places.items()):
        where = "everywhere" if len(found) == len(_PLACES) else "; ".join(found)
        rows.setdefault((where, in_torch, here, reason), []).append(f"`{op}`")
    lines = [f"| {where} | {torch} | {here} | {', '.join(ops)} | {_text(why)} |"
             for (where, torch, here, why), ops in rows.items()]  # fmt: skip
    return "\n".join(["| where | `torch.autocast` | here | ops | why |", "|---|---|---|---|---|", *sorted(lines)])


def command_line() -> str:
    """Return the commands and options as Markdown, from the parsers that read them."""
    commands = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    helps = {one.dest: one.help or "" for one in commands._choices_actions}
    return "\n".join(part for name, one in commands.choices.items() for part in _command(name, one, helps[name]))


def _command(name: str, of: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    usage = of.format_usage().removeprefix("usage: ")
    usage = re.sub(r"\n +", "\n", usage).rstrip() if of.usage else " ".join(usage.split())
    yield from (f"## autoamp {name}", "", f"```text\n{usage}\n```", "")
    yield from (_prose(of.description or f"{summary[0].upper()}{summary[1:]}."), "")
    yield from ("| argument | what |", "|---|---|")
    for action in of._actions:
        if not isinstance(action, argparse._HelpAction):
            yield f"| {_argument(action)} | {_prose(action.help or 'of the program itself')} |"
    yield ""


def _argument(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices or ())) + "}"
    value = action.metavar or (action.dest.upper() if action.choices is None else choices)
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    shown = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{shown}`" for option in action.option_strings)


def _prose(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|")
