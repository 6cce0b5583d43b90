"""Drift: differences between the shipped list sets and the installed torch.

`autoamp lists --check` prints the result of `check_lists`.
"""

from __future__ import annotations

import inspect

import torch

from autoamp.errors import ListFileError
from autoamp.ops.targets import known_ops, locate
from autoamp.rules import CastRule, admits_version, shipped_sets, shipped_table

# Python 3.14 adds these to a class with annotations.
_OF_CLASSES = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})


def public_names() -> frozenset[str]:
    """Return the names of torch's public functions and methods, operators included, without those of `object`."""
    return frozenset(
        name
        for name in known_ops() - _OF_CLASSES
        if not name.startswith("_")
        or (
            name.startswith("__")
            and inspect.getattr_static(torch.Tensor, name) is not inspect.getattr_static(object, name, None)
        )
    )


def check_lists() -> tuple[str, ...]:
    """Compare the shipped list sets with the public names of the installed torch.

    Project lists are not compared: an unknown name in one of those is an error when it is loaded.

    Returns:
        A line for each difference, with the name, the difference and a remedy. There are three kinds: public names of
        torch that are not in the default set, rules on names that this torch lacks although their version limit admits
        it, and rules whose version limit excludes this torch although it has the name.
    """
    version = torch.__version__
    listed = {rule.target.rpartition(".")[2] for rule in shipped_table("default").rules}
    lines = []
    for name in sorted(public_names()):
        out_of_place = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
        if listed.isdisjoint((name, out_of_place)):
            lines.append(f"{name}: new in torch {version}; give it a policy, or a reason under [none]")
    for rule in dict.fromkeys(rule for name in shipped_sets() for rule in shipped_table(name).rules):
        admitted = admits_version(rule.versions, version)
        if admitted and not _is_there(rule):
            lines.append(
                f"{rule.target}: not in torch {version} ({rule.origin}); limit it under [versions], or remove it"
            )
        elif not admitted and _is_there(rule):
            lines.append(f"{rule.target}: in torch {version}, though limited to {rule.versions} ({rule.origin})")
    return tuple(lines)


def _is_there(rule: CastRule) -> bool:
    if rule.bare:
        return rule.target in known_ops()
    try:
        return locate(rule) is not None
    except ListFileError:
        return False
