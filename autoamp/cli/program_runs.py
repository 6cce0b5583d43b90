"""Runs of a program in child processes: `autoamp tune` and `autoamp bisect` compare lists by them."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pickle
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
    Survey,
    list_text,
    printed_metric,
    printed_names,
    reported_metric,
)

__all__ = ["ProgramRuns", "exit_code_of", "handled", "program_runs", "seconds_of", "why_unknown"]

_TERMINATED = "it was terminated"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as ``60s``, ``1.5m``, ``2h`` or ``90``. UsageError for all else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget {text!r} is not a time; give seconds, minutes or hours, such as 60s, 10m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def exit_code_of(stopped: str | None) -> int:
    """Return the exit code by why a search stopped: as a shell has it, 128 and the number of the signal."""
    signals = {INTERRUPTED: signal.SIGINT, _TERMINATED: signal.SIGTERM}
    return 128 + signals[stopped] if stopped in signals else 0


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal so within a ``with`` statement. Threads other than the main one can set no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt(_TERMINATED)


@contextlib.contextmanager
def program_runs(chosen: argparse.Namespace) -> Iterator[ProgramRuns]:
    """Check the options of both commands and yield the runs. SIGTERM acts like Ctrl-C within the block.

    Raises:
        UsageError: An option is invalid, or the program does not exist.
    """
    budget = seconds_of(chosen.budget)
    kind = device_type_of(chosen.device_type)
    if chosen.dtype is None and not has_units(default_half_dtype(kind), kind):
        why = missing_units(default_half_dtype(kind), kind)
        raise UsageError(f"{why}, and programs run in fp32 there; to use half precision anyway, give --dtype")
    if chosen.tolerance < 0 or chosen.survey_steps < 1:
        raise UsageError("--survey-steps must be 1 or more, and --tolerance 0 or more")
    if not chosen.is_module and not os.path.exists(chosen.program):
        raise UsageError(f"can't open file {chosen.program!r}; give the path of a script, or -m a module")
    with handled(signal.SIGTERM, _terminated), tempfile.TemporaryDirectory(prefix="autoamp-") as folder:
        yield ProgramRuns(chosen, Path(folder), time.monotonic() + budget)


def why_unknown(outcomes: Sequence[Outcome], runs: ProgramRuns, name: str) -> str | None:
    """Return why no list can be compared with these runs in fp32; None where each of them told a metric."""
    failed = next((outcome.failed for outcome in outcomes if outcome.failed is not None), None)
    if failed is not None:
        return f"the program fails in fp32: {failed}; repair that first"
    if any(outcome.metric is None for outcome in outcomes):
        printed = f"; it prints {', '.join(runs.printed[:8])}" if runs.printed else ""
        return (
            f"the program reported no metric {name!r} in fp32; name a value that it prints, print a line "
            f"such as '{name}: 0.5', or call autoamp.report_metric({name!r}, value){printed}"
        )
    if any(not math.isfinite(outcome.metric or 0.0) for outcome in outcomes):
        return f"the metric {name!r} is nan or inf in fp32; no list can be compared with that"
    return None


class ProgramRuns:
    """Runs the program in processes of their own, until a deadline.

    Attributes:
        made: How many runs were begun.
        printed: The names that the last run printed numbers of.
    """

    def __init__(self, chosen: argparse.Namespace, folder: Path, deadline: float) -> None:
        self._chosen = chosen
        self._folder = folder
        self._deadline = deadline
        self._longest = 0.0
        self.made = 0
        self.printed: list[str] = []

    def survey(self, seconds: float, *, timed: bool = True) -> Survey:
        """Run the first steps in fp32, and return what they call.

        Args:
            seconds: How long the program runs at most.
            timed: Whether each op is timed after that, for as long.

        Raises:
            UsageError: The program fails, or the deadline came first.
            SystemExit: The user interrupted it.
        """
        timing = seconds if timed else 0.0
        try:
            outcome, failed, _ = self._child("survey", self._chosen.seed, (), seconds=seconds, timing=timing)
        except KeyboardInterrupt as error:
            say("interrupted during the survey; nothing was written")
            raise SystemExit(exit_code_of(str(error) or INTERRUPTED)) from None
        except OutOfBudget:
            raise UsageError("the budget was spent before the end of the survey; give a larger --budget") from None
        if "survey" not in outcome:
            raise UsageError(f"the program cannot be surveyed: {failed or 'it ended its process'}")
        found: Survey = outcome["survey"]
        return found

    def run(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        """Run the program with these changes, in fp32 for None."""
        entries = "entry" if candidate and len(candidate) == 1 else "entries"
        name = "in fp32" if candidate is None else f"with {len(candidate)} {entries}" if candidate else "as it is"
        if time.monotonic() + self._longest > self._deadline:
            raise OutOfBudget
        say(f"a run {name}, seed {seed}")
        start = time.monotonic()
        outcome, failed, output = self._child("fp32" if candidate is None else "lists", seed, candidate or ())
        self._longest = max(self._longest, time.monotonic() - start)
        metric = reported_metric(self._folder / f"{self.made}.metrics", self._chosen.metric)
        self.printed = printed_names(output)
        if metric is None:
            metric = printed_metric(output, self._chosen.metric)
        if metric is None:
            metric = outcome.get("variable")
        return Outcome(metric, outcome.get("seconds"), outcome.get("peak_bytes"), failed)

    def _child(
        self, mode: str, seed: int, candidate: tuple[Proposal, ...], **how: float
    ) -> tuple[dict[str, Any], str | None, str]:
        """Return what a child wrote, why it failed, and what it printed. OutOfBudget: it was ended at the deadline."""
        self.made += 1
        chosen, own = self._chosen, self._folder / f"{self.made}"
        files = {name: own.with_suffix(f".{name}") for name in ("spec", "outcome", "metrics", "out", "err", "toml")}
        lists, environment = tuple(chosen.lists), {**os.environ, METRICS_VARIABLE: str(files["metrics"])}
        if candidate:
            files["toml"].write_text(list_text(candidate), encoding="utf-8")
            # It lies over what --lists names as well; a program may call init() itself.
            lists = (*lists, str(files["toml"]))
            before = environment.get(ENVIRONMENT_VARIABLE)
            environment[ENVIRONMENT_VARIABLE] = os.pathsep.join(filter(None, (before, str(files["toml"]))))
        options = Options(chosen.dtype, chosen.device_type, lists, opt_level="O0" if mode == "fp32" else "O1")
        spec = {
            "mode": mode, "seed": seed, "metric": chosen.metric, "outcome": str(files["outcome"]),
            "is_module": chosen.is_module, "options": options.as_dict(), "steps": chosen.survey_steps,
            "modules": [one.name for one in candidate if one.of_module], **how,
        }  # fmt: skip
        files["spec"].write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "autoamp.cli.program_child", str(files["spec"]), chosen.program, *chosen.args]
        with open(files["out"], "wb") as out, open(files["err"], "wb") as err:
            code = self._waited_for(command, environment, out, err)
        written = pickle.loads(files["outcome"].read_bytes()) if files["outcome"].exists() else {}
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
