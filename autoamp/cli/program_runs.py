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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoamp import tuning
from autoamp.cli.launch import take_path
from autoamp.cli.output import say
from autoamp.cli.session import half_dtype
from autoamp.errors import UsageError
from autoamp.half_units import default_half_dtype, has_units, missing_units
from autoamp.rules import ENVIRONMENT_VARIABLE
from autoamp.runtime import Settings, check_device

_SIGNALS = {signal.SIGINT: "it was interrupted", signal.SIGTERM: "it was terminated"}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class MetricUnknown(Exception):
    """A run in fp32 failed or told no finite metric, so no list can be compared with it."""


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as ``60s``, ``1.5m``, ``2h`` or ``90``. UsageError for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget {text!r} is not a time; give seconds, minutes or hours, such as 60s, 10m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def _stop(number: int, frame: object) -> None:
    # The search ends in order, whatever a user in a hurry sends.
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    # As a shell has it: 128 and the number of the signal.
    raise tuning.Stopped(_SIGNALS[signal.Signals(number)], exit_code=128 + number)


@contextlib.contextmanager
def program_runs(chosen: argparse.Namespace) -> Iterator[ProgramRuns]:
    """Check the options of both commands and yield the runs.

    The first SIGINT or SIGTERM inside the block raises `Stopped`.

    Raises:
        UsageError: An option is invalid, or the program does not exist.
        ListFileError: A list cannot be used.
    """
    budget = seconds_of(chosen.budget)
    kind = Settings.from_arguments(chosen.lists or None, chosen.device_type, half_dtype(chosen.dtype)).device_type
    check_device(kind)
    if chosen.dtype is None and not has_units(default_half_dtype(kind), kind):
        why = missing_units(default_half_dtype(kind), kind)
        raise UsageError(f"{why}, and programs run in fp32 there; to use half precision anyway, give --dtype")
    if not chosen.tolerance >= 0 or chosen.survey_steps < 1:
        raise UsageError("--survey-steps must be 1 or more, and --tolerance 0 or more")
    take_path(chosen)
    before = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        with tempfile.TemporaryDirectory(prefix="autoamp-") as folder:
            yield ProgramRuns(chosen, Path(folder), budget)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgramRuns:
    """Runs the program in processes of their own.

    Args:
        chosen: The parsed command line.
        folder: For temporary files.
        budget: The seconds that all runs may take.

    Attributes:
        budget: The same.
        made: How many runs were begun.
    """

    def __init__(self, chosen: argparse.Namespace, folder: Path, budget: float) -> None:
        self.budget = budget
        self.made = 0
        self._chosen = chosen
        self._folder = folder
        self._deadline = time.monotonic() + budget
        self._longest = 0.0

    def survey(self, seconds: float, *, timed: bool = True) -> tuning.Survey:
        """Run the first steps in fp32, and return what they call.

        Args:
            seconds: How long the program runs at most.
            timed: Whether each op is timed after that, for as long.

        Raises:
            UsageError: The program fails, or the budget was spent first.
            SystemExit: A signal interrupted it.
        """
        timing = seconds if timed else 0.0
        try:
            found, failed, _ = self._child("survey", self._chosen.seed, (), seconds=seconds, timing=timing)
        except tuning.Stopped as stopped:
            if stopped.exit_code:
                say("interrupted during the survey; nothing was written")
                raise SystemExit(stopped.exit_code) from None
            raise UsageError("the budget was spent before the end of the survey; give a larger --budget") from None
        if "survey" not in found:
            raise UsageError(f"the program cannot be surveyed: {failed or 'it ended its process'}")
        survey: tuning.Survey = found["survey"]
        return survey

    def run(self, candidate: tuple[tuning.Proposal, ...] | None, seed: int) -> tuning.Outcome:
        """Run the program with these changes, in fp32 for None.

        Raises:
            Stopped: The budget was spent, or a signal interrupted it.
            MetricUnknown: The run is in fp32, and failed or told no finite metric.
        """
        entries = "entry" if candidate and len(candidate) == 1 else "entries"
        name = "in fp32" if candidate is None else f"with {len(candidate)} {entries}" if candidate else "as it is"
        start = time.monotonic()
        if start + self._longest > self._deadline:
            raise tuning.Stopped("the budget was spent")
        say(f"a run {name}, seed {seed}")
        found, failed, output = self._child("fp32" if candidate is None else "lists", seed, candidate or ())
        self._longest = max(self._longest, time.monotonic() - start)
        metric = tuning.metric_of(self._chosen.metric, self._folder / f"{self.made}.metrics", output)
        if metric is None:
            metric = found.get("variable")
        if candidate is None:
            self._check_metric(metric, failed, output)
        return tuning.Outcome(metric, found.get("seconds"), failed)

    def _check_metric(self, metric: float | None, failed: str | None, output: str) -> None:
        name = self._chosen.metric
        if failed is not None:
            raise MetricUnknown(f"the program fails in fp32: {failed}; repair that first")
        if metric is None:
            names = tuning.printed_names(output)
            printed = f"; it prints {', '.join(names[:8])}" if names else ""
            raise MetricUnknown(
                f"the program reported no metric {name!r} in fp32; name a value that it prints, print a line "
                f"such as '{name}: 0.5', or call autoamp.report_metric({name!r}, value){printed}"
            )
        if not math.isfinite(metric):
            raise MetricUnknown(f"the metric {name!r} is nan or inf in fp32; no list can be compared with that")

    def _child(
        self, mode: str, seed: int, candidate: tuple[tuning.Proposal, ...], **how: float
    ) -> tuple[dict[str, Any], str | None, str]:
        """Return what a child wrote, why it failed, and what it printed. Stopped: the budget was spent."""
        self.made += 1
        chosen, own = self._chosen, self._folder / f"{self.made}"
        files = {name: own.with_suffix(f".{name}") for name in ("outcome", "metrics", "out", "err", "toml")}
        lists, environment = list(chosen.lists), {**os.environ, tuning.METRICS_VARIABLE: str(files["metrics"])}
        if candidate:
            files["toml"].write_text(tuning.list_text(candidate), encoding="utf-8")
            # It takes precedence over --lists as well; a program may call init() itself.
            lists.append(str(files["toml"]))
            before = environment.get(ENVIRONMENT_VARIABLE)
            environment[ENVIRONMENT_VARIABLE] = os.pathsep.join(filter(None, (before, str(files["toml"]))))
        spec = {
            **vars(chosen), "lists": lists, "seed": seed, "opt_level": "O0" if mode == "fp32" else "O1", "mode": mode,
            "outcome": str(files["outcome"]), **how,
        }  # fmt: skip
        command = [sys.executable, "-m", "autoamp.cli.program_child", json.dumps(spec)]
        with open(files["out"], "wb") as out, open(files["err"], "wb") as err:
            code = self._waited_for(command, environment, out, err)
        written = pickle.loads(files["outcome"].read_bytes()) if files["outcome"].exists() else {}
        printed, errors = (files[name].read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no word on stderr")
        # tqdm writes to stderr.
        return written, None if code == 0 else f"exit code {code}: {last[:200]}", errors + "\n" + printed

    def _waited_for(self, command: list[str], environment: dict[str, str], out: Any, err: Any) -> int:
        """Return the exit code of a child. An exception kills the child and all that it started."""
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            return child.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise tuning.Stopped("the budget was spent") from None
        finally:
            if child.poll() is None:
                # On Windows a process has no group.
                os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
                child.wait()
