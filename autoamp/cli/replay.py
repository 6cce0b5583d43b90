"""`autoamp replay`: run the step of a capsule again, and name the op that made inf or nan."""

from __future__ import annotations

import argparse

from autoamp.cli.output import say
from autoamp.diagnostics import load_capsule, versions

_COMPARED = ("kind", "op", "module", "phase")


def replay(chosen: argparse.Namespace) -> int:
    """Run the step of a capsule again and print the finding. Returns 0 if the run had the same finding, else 1."""
    capsule = load_capsule(chosen.capsule)
    say(f"the run found: {capsule.text}")
    here = versions()
    for name, before in capsule.versions.items():
        if here.get(name) != before:
            say(f"the run had {name} {before}, here is {here.get(name)}")
    found = capsule.replay()
    say(f"run again: {found}")
    now = found.to_dict()
    different = [name for name in _COMPARED if now[name] != capsule.overflow.get(name)]
    for name in different:
        say(f"{name}: {capsule.overflow.get(name)} in the run, {now[name]} here", wrong=True)
    return 1 if different else 0
