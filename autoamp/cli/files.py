"""`autoamp report` and `autoamp replay`: they show what a run wrote to a file."""

from __future__ import annotations

import argparse

from autoamp.cli.output import say
from autoamp.cli.run import FAILED
from autoamp.core import versions
from autoamp.errors import UsageError
from autoamp.tools import failures, is_page, load_capsule, load_report, write_report


def report(chosen: argparse.Namespace) -> int:
    """Write the page of a run, from the JSON of ``--report``. Returns the exit code."""
    if not is_page(chosen.output):
        raise UsageError(f"--output {chosen.output!r} must end in .html")
    document = load_report(chosen.run)
    try:
        found = failures(document, chosen.fail_on) if chosen.fail_on else []
        write_report(chosen.output, document)
    except UsageError:
        raise
    except Exception as error:
        remedy = "give a file as autoamp run --report FILE.json wrote it"
        raise UsageError(f"{chosen.run!r} is damaged ({type(error).__name__}: {error}); {remedy}") from None
    say(f"wrote {chosen.output}")
    for line in found:
        say(f"{chosen.run}: {line}")
    return FAILED if found else 0


def replay(chosen: argparse.Namespace) -> int:
    """Run the step of a capsule again and print the finding. Returns 0 if the run had the same finding, else 1."""

    def tell(text: str, **options: bool) -> None:
        # A terminal would act on what a file may hold.
        say("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), **options)

    capsule = load_capsule(chosen.capsule)
    tell(f"the run found: {capsule.text}")
    here = versions()
    for name, before in capsule.versions.items():
        if here.get(name) != before:
            tell(f"the run had {name} {before}, here is {here.get(name)}")
    found = capsule.replay()
    tell(f"run again: {found}")
    now = found.to_dict()
    different = [name for name in ("kind", "op", "module", "phase") if now[name] != capsule.overflow.get(name)]
    for name in different:
        tell(f"{name}: {capsule.overflow.get(name)} in the run, {now[name]} here", wrong=True)
    return 1 if different else 0
