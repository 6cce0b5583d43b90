"""`autoamp report`: the page of a run, from the JSON that `autoamp run --report` wrote."""

from __future__ import annotations

import argparse

from autoamp.cli.output import say
from autoamp.diagnostics import failures, is_page, load_report, write_report
from autoamp.errors import UsageError

FAILED = 3
"""The exit code where ``--fail-on`` found skips."""


def report(chosen: argparse.Namespace) -> int:
    """Write the page. Returns the exit code."""
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
