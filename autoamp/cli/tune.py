"""`autoamp tune`: surveys a program, tries changes of its lists on it, and writes the list that came of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autoamp.cli.options import Options
from autoamp.cli.output import say
from autoamp.errors import UsageError
from autoamp.half_units import has_units, missing_units
from autoamp.rules import ENVIRONMENT_VARIABLE
from autoamp.runtime import device_type_of
from autoamp.tensors import default_half_dtype
from autoamp.tuning import (
    INTERRUPTED,
    METRICS_VARIABLE,
    Outcome,
    OutOfBudget,
    Proposal,
    Search,
    SearchResult,
    Survey,
    list_text,
    printed_metric,
    printed_names,
    proposals_of,
    reported_metric,
    summary_of,
    write_list,
)

__all__ = ["seconds_of", "tune"]

# What of the budget the survey may take, half of it for the program and half for timing ops.
_SURVEY = 0.4
_TERMINATED = "it was terminated"
# By why a search stopped: as a shell has it, 128 and the number of the signal.
_CODES = {INTERRUPTED: 128 + signal.SIGINT, _TERMINATED: 128 + signal.SIGTERM}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as ``60s``, ``1.5m``, ``2h`` or ``90``. UsageError for all else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget {text!r} is no time; give seconds, minutes or hours, such as 60s, 10m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def tune(chosen: argparse.Namespace) -> int:
    """Tune, write the list and print what was found. Returns the exit code."""
    output = Path(chosen.output).absolute()
    budget = seconds_of(chosen.budget)
    if output.exists():
        raise UsageError(f"--output {chosen.output!r} exists; move it away, as it would be in force while tuning")
    kind = device_type_of(chosen.device_type)
    if chosen.dtype is None and not has_units(default_half_dtype(kind), kind):
        why = missing_units(default_half_dtype(kind), kind)
        raise UsageError(f"{why}, so that fp32 is the fastest; to tune for half precision all the same, give --dtype")
    if not output.parent.is_dir():
        raise UsageError(f"--output {chosen.output!r} cannot be written: give a file in a directory that exists")
    if chosen.seeds < 1 or chosen.tolerance < 0 or chosen.survey_steps < 1:
        raise UsageError("--seeds and --survey-steps take 1 or more, and --tolerance 0 or more")
    if not chosen.is_module and not os.path.exists(chosen.program):
        raise UsageError(f"can't open file {chosen.program!r}; give the path of a script, or -m a module")
    seeds = [chosen.seed + number for number in range(chosen.seeds)]
    with _sigterm_interrupts(), tempfile.TemporaryDirectory(prefix="autoamp-tune-") as folder:
        runs = _Runs(chosen, Path(folder), time.monotonic() + budget)
        say(f"surveying {chosen.program} in fp32, for {_SURVEY * budget:.0f} s at most")
        try:
            survey = runs.survey(_SURVEY * budget / 2)
        except KeyboardInterrupt as error:
            say("interrupted before anything was known; nothing was written")
            return _CODES.get(str(error), _CODES[INTERRUPTED])
        except OutOfBudget:
            raise UsageError("the budget was spent before the survey had ended; give a larger --budget") from None
        proposals = proposals_of(survey, max_error=chosen.max_error)
        say(f"{len(survey.uses)} uses of ops, {len(proposals)} changes to try")
        search = Search(
            runs.run, proposals, seeds, tolerance=chosen.tolerance, higher_is_better=chosen.higher_is_better
        )
        result = search.search()
    if (unknown := _unknown(result, chosen, runs)) is not None:
        say(f"{unknown}. Nothing was written", wrong=True)
        return 1
    lines = summary_of(survey, result, seeds, chosen.metric)
    extends = _extends(chosen.lists, survey, output.parent)
    _write(output, list_text(result.chosen, extends, ["Written by autoamp tune.", *lines, ""]))
    for line in lines:
        say(line)
    say(f"{chosen.output}: {len(result.chosen)} entries")
    return _exit_code(result)


@contextlib.contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal so within a ``with`` statement. Threads other than the main one can set no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _sigterm_interrupts() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM do what Ctrl-C does: the running program ends, its folder goes, and the best so far is written."""

    def terminated(number: int, frame: object) -> None:
        raise KeyboardInterrupt(_TERMINATED)

    return _handled(signal.SIGTERM, terminated)


def _write(output: Path, text: str) -> None:
    """Write the list; a second signal, of a user in a hurry, does not leave half of it."""
    with _handled(signal.SIGINT, signal.SIG_IGN), _handled(signal.SIGTERM, signal.SIG_IGN):
        write_list(output, text)


def _exit_code(result: SearchResult) -> int:
    if result.stopped in _CODES:
        return _CODES[result.stopped]
    return 0


def _unknown(result: SearchResult, chosen: argparse.Namespace, runs: _Runs) -> str | None:
    """Return why nothing can be said of any list; None where the metric is known in fp32, or no run was made."""
    fp32, name = result.fp32, chosen.metric
    if fp32 is None or fp32.metric == fp32.metric:
        return None
    if fp32.failed is not None:
        return f"the program fails in fp32, so that no list can be tried: {fp32.failed}"
    if None not in [outcome.metric for outcome in fp32.outcomes]:
        return f"the metric {name!r} is nan in fp32 already, so that no list can be compared with that"
    printed = f"; it prints {', '.join(runs.printed[:8])}" if runs.printed else ""
    return (
        f"expected the metric {name!r} from the program, and found none in fp32: name what it prints, print a line "
        f"such as '{name}: 0.5', or call autoamp.report_metric({name!r}, value){printed}"
    )


def _extends(lists: Sequence[str], survey: Survey, folder: Path) -> list[str]:
    """Return what the list says under ``extends``: nothing where it lies over what applies anyway."""
    if not lists:
        return []
    base = "bf16" if survey.dtype == "bfloat16" else "default"
    files = [os.path.relpath(name, folder) if os.path.exists(name) else name for name in lists]
    named = [name for name in lists if not os.path.exists(name)]
    return files if named else [base, *files]


class _Runs:
    """Runs the program in processes of their own, until a deadline.

    Attributes:
        printed: The names that the last run printed numbers of.
    """

    def __init__(self, chosen: argparse.Namespace, folder: Path, deadline: float) -> None:
        self._chosen = chosen
        self._folder = folder
        self._deadline = deadline
        self._number = 0
        self._longest = 0.0
        self.printed: list[str] = []

    def survey(self, seconds: float) -> Survey:
        """Return the survey. UsageError: the program fails."""
        outcome, failed, _ = self._child("survey", self._chosen.seed, (), seconds=seconds)
        if "survey" not in outcome:
            raise UsageError(f"the program cannot be surveyed: {failed or 'it ended its process'}")
        return Survey.from_json(outcome["survey"])

    def run(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        """Run the program with these changes, in fp32 for None."""
        name = "in fp32" if candidate is None else f"with {len(candidate)} changes" if candidate else "as it is"
        if time.monotonic() + self._longest > self._deadline:
            raise OutOfBudget
        say(f"a run {name}, seed {seed}")
        start = time.monotonic()
        outcome, failed, output = self._child("fp32" if candidate is None else "lists", seed, candidate or ())
        self._longest = max(self._longest, time.monotonic() - start)
        metric = reported_metric(self._folder / f"{self._number}.metrics", self._chosen.metric)
        self.printed = printed_names(output)
        if metric is None:
            metric = printed_metric(output, self._chosen.metric)
        if metric is None:
            metric = outcome.get("variable")
        return Outcome(metric, outcome.get("seconds"), outcome.get("peak_bytes"), failed)

    def _child(
        self, mode: str, seed: int, candidate: tuple[Proposal, ...], seconds: float = 0.0
    ) -> tuple[dict[str, Any], str | None, str]:
        """Return what a child wrote, why it failed, and what it printed. OutOfBudget: it was ended at the deadline."""
        self._number += 1
        chosen, own = self._chosen, self._folder / f"{self._number}"
        files = {name: own.with_suffix(f".{name}") for name in ("spec", "outcome", "metrics", "out", "err", "toml")}
        options = Options(
            dtype=chosen.dtype, device_type=chosen.device_type, lists=tuple(chosen.lists),
            opt_level="O0" if mode == "fp32" else "O1",
        )  # fmt: skip
        environment = {**os.environ, METRICS_VARIABLE: str(files["metrics"])}
        if candidate:
            files["toml"].write_text(list_text(candidate), encoding="utf-8")
            # It lies over what --lists names as well.
            options = Options.of({**options.as_dict(), "lists": (*options.lists, str(files["toml"]))})
            before = environment.get(ENVIRONMENT_VARIABLE)
            # The program may call init() itself.
            environment[ENVIRONMENT_VARIABLE] = os.pathsep.join(filter(None, (before, str(files["toml"]))))
        spec = {
            "mode": mode, "seed": seed, "metric": chosen.metric, "outcome": str(files["outcome"]),
            "is_module": chosen.is_module, "options": options.as_dict(), "steps": chosen.survey_steps,
            "seconds": seconds,
        }  # fmt: skip
        files["spec"].write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "autoamp.cli.tune_child", str(files["spec"]), chosen.program, *chosen.args]
        with open(files["out"], "wb") as out, open(files["err"], "wb") as err:
            code = self._waited_for(command, environment, out, err)
        written = json.loads(files["outcome"].read_text(encoding="utf-8")) if files["outcome"].exists() else {}
        printed, errors = (files[name].read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no word on stderr")
        # tqdm writes to stderr.
        return written, None if code == 0 else f"exit code {code}: {last[:200]}", errors + "\n" + printed

    def _waited_for(self, command: list[str], environment: dict[str, str], out: Any, err: Any) -> int:
        """Return the exit code of a child. Whoever ends the wait ends the child with all that it started."""
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            return child.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OutOfBudget from None
        finally:
            if child.poll() is None:
                # On Windows a process has no group.
                os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
                child.wait()
