"""Drift: differences between the shipped list sets and the installed torch.

`autoamp lists --check` prints the result of `check_lists`. torch's own policies are read from `ATen/autocast_mode.h`,
which torch installs among its headers.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import torch

from autoamp.errors import ListFileError
from autoamp.ops import known_ops, locate
from autoamp.rules import CastPolicy, CastRule, admits_version, shipped_sets, shipped_table

__all__ = ["Drift", "autocast_header", "check_lists", "parse_autocast", "public_names"]

_POLICIES = {
    "LOWER_PRECISION_FP": CastPolicy.FP16,
    "FP32": CastPolicy.FP32,
    "FP32_SET_OPT_DTYPE": CastPolicy.FP32,
    "DIFFERENT_REDISPATCH_SIGNATURE": CastPolicy.FP32,
    "PROMOTE": CastPolicy.PROMOTE,
}
# The dispatcher's ops whose Python function has another name.
_PYTHON_NAMES = {"nll_loss2d": "nll_loss", "_thnn_fused_lstm_cell": "lstm", "_thnn_fused_gru_cell": "gru"}
# Python 3.14 adds these to a class with annotations.
_OF_CLASSES = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})


class Drift(NamedTuple):
    """The differences between the shipped list sets and a torch.

    Attributes:
        torch: The version of the installed torch.
        header: The header that was read, None where this torch has none; policies are not compared then.
        lines: A line for each difference, with the name, the difference and a remedy. There are four kinds: public
            names of torch that are not in the default set, rules on names that this torch lacks although their version
            limit admits it, rules whose version limit excludes this torch although it has the name, and ops whose
            policy differs from the one in torch's header.
    """

    torch: str
    header: Path | None
    lines: tuple[str, ...]


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


def autocast_header() -> Path | None:
    """Return the path of `autocast_mode.h` among torch's headers, None where torch was installed without them."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    return header if header.is_file() else None


def parse_autocast(text: str) -> dict[str, CastPolicy]:
    """Read the policy of each op out of the `AT_FORALL_*` lists of `autocast_mode.h`.

    Returns:
        Policies by the names that Python uses: `linalg_vecdot` is `vecdot`, the `upsample_*` are `interpolate`.

    Raises:
        ValueError: A list is missing or empty: the header's form has changed.
    """
    found: dict[str, CastPolicy] = {}
    for macro, policy in _POLICIES.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", text)
        ops = re.findall(r"_\((?:ADD_NS\()?([a-z_0-9]+)", body[1]) if body else []
        if not ops:
            raise ValueError(f"autocast_mode.h has no list AT_FORALL_{macro}; its form has changed: read it by hand")
        for op in ops:
            name = "interpolate" if "upsample_" in op else _PYTHON_NAMES.get(op, op.removeprefix("linalg_"))
            found[name] = policy
    return found


def check_lists() -> Drift:
    """Compare the shipped list sets with the installed torch: its public names, and the policies of its autocast.

    Project lists are not compared: an unknown name in one of those is an error when it is loaded.

    Raises:
        ValueError: The form of torch's header has changed.
    """
    version, header, default = torch.__version__, autocast_header(), shipped_table("default")
    listed = {rule.target.rpartition(".")[2] for rule in default.rules}
    lines = [
        f"{name}: new in torch {version}; give it a policy, or a reason under [none]"
        for name in sorted(public_names())
        if not _covered(name, listed)
    ]
    for rule in dict.fromkeys(rule for name in shipped_sets() for rule in shipped_table(name).rules):
        admitted = admits_version(rule.versions, version)
        if admitted and not _is_there(rule):
            lines.append(
                f"{rule.target}: not in torch {version} ({rule.origin}); limit it under [versions], or remove it"
            )
        elif not admitted and _is_there(rule):
            lines.append(f"{rule.target}: in torch {version}, though limited to {rule.versions} ({rule.origin})")
    policies = parse_autocast(header.read_text(encoding="utf-8")) if header else {}
    for op, policy in sorted(policies.items()):
        found = default.policy_of(op)
        if found is None or found.policy is not policy:
            ours = "in no list" if found is None else f"{found.policy.value} ({found.origin})"
            lines.append(f"{op}: {policy.value} in torch's autocast, {ours} here")
    return Drift(version, header, tuple(lines))


def _covered(name: str, listed: set[str]) -> bool:
    """Tell whether a name is in the lists, or is the in-place form of a name that is."""
    if name in listed:
        return True
    if name.startswith("__i") and f"__{name[3:]}" in listed:
        return True
    return name.endswith("_") and not name.endswith("__") and name[:-1] in listed


def _is_there(rule: CastRule) -> bool:
    if rule.bare:
        return rule.target in known_ops()
    try:
        return locate(rule) is not None
    except ListFileError:
        return False
