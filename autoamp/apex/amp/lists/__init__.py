"""The list set `apex` as the names in `apex.amp.lists`, and the changes that programs make there."""

from __future__ import annotations

import sys
from typing import Any

from autoamp.core import expand, load_table

_MODULES = ("functional_overrides", "tensor_overrides", "torch_overrides")

_LISTS = {"FP16_FUNCS": "fp16", "FP32_FUNCS": "fp32", "CASTS": "promote", "BANNED_FUNCS": "banned"}


def lists_of(owner: Any) -> dict[str, Any]:
    """Return what a module of `apex.amp.lists` has: the names that the list set `apex` has for a module or class.

    The lists are copies: what a program adds or removes takes effect at its next ``amp.init`` or ``amp.initialize``.
    """
    found: dict[str, set[str]] = {policy: set() for policy in _LISTS.values()}
    for target in expand(load_table(["apex"], base="apex")).targets:
        if target.parent is owner:
            found.setdefault(target.rule.policy.value, set()).add(target.attribute)
    copies = {attribute: sorted(found[policy]) for attribute, policy in _LISTS.items()}
    return {"MODULE": owner, "names": found, "SEQUENCE_CASTS": [], **copies}


def changed_lists() -> list[dict[str, list[str]]]:
    """Return what a program has added to or taken from `apex.amp.lists`, as ``lists=`` takes it; empty for no change.

    An added name is put under its new policy, whatever list it was in before. One that is in no list any more is not
    patched. Names that the module or class does not have are passed over, as Apex did.
    """
    changes: dict[str, list[str]] = {}
    for name in _MODULES:
        module = sys.modules.get(f"{__name__}.{name}")
        if module is None:
            continue
        owner, before = module.MODULE, module.names
        # Functions of torch.nn.functional call tensor methods of the same name, which need the same policy. A bare name
        # in a list means all of them.
        prefix = "" if name == _MODULES[0] else "torch.Tensor." if isinstance(owner, type) else "torch."
        now: set[str] = set()
        for attribute, policy in {**_LISTS, "SEQUENCE_CASTS": "promote"}.items():
            listed = getattr(module, attribute)
            now.update(listed)
            added = [entry for entry in listed if entry not in before[policy] and hasattr(owner, entry)]
            changes.setdefault(policy, []).extend(f"{prefix}{entry}" for entry in added)
        gone = {entry for policy in _LISTS.values() for entry in before[policy]} - now
        changes.setdefault("none", []).extend(f"{prefix}{entry}" for entry in sorted(gone))
    changes = {policy: sorted(set(entries)) for policy, entries in changes.items() if entries}
    return [changes] if changes else []
