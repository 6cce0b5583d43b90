"""The list set `apex` by the names that `apex.amp.lists` had."""

from __future__ import annotations

from typing import Any

from autoamp.rules import CastPolicy, load_table
from autoamp.targets import expand

__all__ = ["names_of"]


def names_of(owner: Any, policy: str) -> list[str]:
    """Return the attributes of a module or class that the list set `apex` puts under a policy, sorted."""
    wanted = CastPolicy(policy)
    targets = expand(load_table(["apex"], base="apex")).targets
    return sorted({target.attribute for target in targets if target.parent is owner and target.rule.policy is wanted})
