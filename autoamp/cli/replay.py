"""`autoamp replay`: run the step of a capsule again, and name the op that made inf or nan."""

from __future__ import annotations

import argparse

from autoamp.cli.output import say
from autoamp.diagnostics import load_capsule, versions
from autoamp.runtime import Handle, check_device, put_handle, runtime_of

__all__ = ["replay"]

_COMPARED = ("kind", "op", "module", "phase")


def replay(chosen: argparse.Namespace) -> int:
    """Run the step of a capsule again and print the finding. Returns 0 if the run had the same finding, else 1."""
    capsule = load_capsule(chosen.capsule, lambda text: say(f"the run found: {text}"))
    here = versions()
    for name, before in capsule.versions.items():
        if here.get(name) != before:
            say(f"the run had {name} {before}, here is {here.get(name)}")
    check_device(capsule.settings.device_type)
    handle = Handle(capsule.settings)
    put_handle(handle)
    trace = runtime_of(handle).overflows
    assert trace is not None
    try:
        for module, precision in capsule.precisions:
            handle.override(module, precision)
        found = trace.explain_records(capsule.records, capsule.scale)
    finally:
        handle.deactivate()
    say(f"run again: {found}")
    now = found.to_dict()
    different = [name for name in _COMPARED if now[name] != capsule.overflow[name]]
    for name in different:
        say(f"{name}: {capsule.overflow[name]} in the run, {now[name]} here", wrong=True)
    return 1 if different else 0
