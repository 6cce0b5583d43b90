"""Drift: what the shipped list sets say, compared with the torch that is installed.

`autoamp lists --check` prints what `check_lists` finds. torch's own policies are read from `ATen/autocast_mode.h`,
which torch installs among its headers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
# The dispatcher's ops that Python sees by another name, or through the function that calls them.
_PYTHON_NAMES = {"nll_loss2d": "nll_loss", "_thnn_fused_lstm_cell": "lstm", "_thnn_fused_gru_cell": "gru"}
# What Python 3.14 adds to a class with annotations.
_OF_CLASSES = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})


@dataclass(frozen=True, slots=True)
class Drift:
    """The differences between the shipped list sets and a torch; empty tuples where there are none.

    Attributes:
        torch: The version of the installed torch.
        added: Public names of torch that the default set neither lists nor leaves alone with a reason.
        gone: Rules on names that this torch lacks, though no version limit says so.
        back: Rules that a version limit keeps from this torch, though it has the name.
        moved: Ops whose policy differs from the one in torch's header: the op, torch's policy, and our rule or None.
        header: The header that was read, None where this torch has none; `moved` is empty then.
    """

    torch: str
    added: tuple[str, ...]
    gone: tuple[CastRule, ...]
    back: tuple[CastRule, ...]
    moved: tuple[tuple[str, CastPolicy, CastRule | None], ...]
    header: Path | None

    def __bool__(self) -> bool:
        return bool(self.added or self.gone or self.back or self.moved)

    def lines(self) -> Iterator[str]:
        """Yield a line for each difference: the name, what is the matter with it, and what to do."""
        for name in self.added:
            yield f"{name}: new in torch {self.torch}; give it a policy, or a reason under [none]"
        for rule in self.gone:
            yield f"{rule.target}: not in torch {self.torch} ({rule.origin}); limit it under [versions], or remove it"
        for rule in self.back:
            yield f"{rule.target}: in torch {self.torch}, though limited to {rule.versions} ({rule.origin})"
        for op, policy, found in self.moved:
            ours = "in no list" if found is None else f"{found.policy.value} ({found.origin})"
            yield f"{op}: {policy.value} in torch's autocast, {ours} here"


def public_names() -> frozenset[str]:
    """Return the names of torch's public callables that are no classes, operators included, Python's own left out."""
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

    Project lists are not looked at: an unknown name in one of those is an error when it is loaded.

    Raises:
        ValueError: The form of torch's header has changed.
    """
    version, header = torch.__version__, autocast_header()
    default = shipped_table("default")
    listed = {rule.target.rpartition(".")[2] for rule in default.rules}
    rules = {rule: None for name in shipped_sets() for rule in shipped_table(name).rules}
    there = {rule: _is_there(rule) for rule in rules}
    policies = parse_autocast(header.read_text(encoding="utf-8")) if header else {}
    return Drift(
        torch=version,
        added=tuple(sorted(name for name in public_names() if not _covered(name, listed))),
        gone=tuple(rule for rule in rules if admits_version(rule.versions, version) and not there[rule]),
        back=tuple(rule for rule in rules if not admits_version(rule.versions, version) and there[rule]),
        moved=tuple(
            (op, policy, rule)
            for op, policy in sorted(policies.items())
            if (rule := default.policy_of(op)) is None or rule.policy is not policy
        ),
        header=header,
    )


def _covered(name: str, listed: set[str]) -> bool:
    """Tell whether a name stands in the lists, or is the in-place form of one that does."""
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
