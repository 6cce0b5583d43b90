"""`autoamp tune` and `autoamp bisect`: they try changes of a program's lists in runs of it, each in a child process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import pickle
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoamp import core
from autoamp.cli.launch import prepared, take_path
from autoamp.cli.output import say, writable
from autoamp.cli.session import Options, Run, set_up
from autoamp.core import ENVIRONMENT_VARIABLE, Settings, check_device, listen, load_table, package_tables
from autoamp.errors import UsageError
from autoamp.half_units import default_half_dtype, has_units, missing_units
from autoamp.tools import BaseHandle, tuning

# The first steps also allocate memory and compile kernels, so they are not timed.
_WARM_UP = 2
# The part of the budget that the survey may take, half of it for the program and half for timing ops.
_SURVEY = 0.4
_NOT_RESTORED = (
    "the metric differs even with every surveyed module and op in fp32. The cause may be an op that runs after the "
    "surveyed steps (raise --survey-steps), a skipped step, or a model whose weights are in half precision"
)
_SIGNALS = {signal.SIGINT: "it was interrupted", signal.SIGTERM: "it was terminated"}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def tune(chosen: argparse.Namespace) -> int:
    """Tune, write the list and print the result. Returns the exit code."""
    output = writable("--output", chosen.output)
    if output.exists():
        remedy = "move it away, because the runs would use it as the project's list"
        raise UsageError(f"--output {chosen.output!r} exists; {remedy}")
    if chosen.seeds < 1:
        raise UsageError("--seeds must be 1 or more")
    if not chosen.max_error >= 0:
        raise UsageError("--max-error must be 0 or more")
    with program_runs(chosen) as runs:
        seconds = _SURVEY * runs.budget
        say(f"surveying {chosen.program} in fp32, for {seconds:.0f} s at most")
        survey = runs.survey(seconds / 2, timing=seconds / 2)
        proposals = tuning.proposals_of(survey, max_error=chosen.max_error)
        say(f"uses of ops: {len(survey.uses)}; changes to try: {len(proposals)}")
        search = tuning.Search(
            run=runs.run, seeds=range(chosen.seed, chosen.seed + chosen.seeds), tolerance=chosen.tolerance,
            proposals=proposals, higher_is_better=chosen.higher_is_better,
        )  # fmt: skip
        search.search()
        lines = search.summary(survey, chosen.metric)
        extends = _extends(chosen.lists, survey, output.parent)
        text = tuning.list_text(search.chosen, extends, ["Written by autoamp tune.", *lines, ""])
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {chosen.output!r} cannot be written ({error}); give another file") from None
    for line in [*lines, f"{chosen.output}: {len(search.chosen)} entries"]:
        say(line)
    return 0 if search.stopped is None else search.stopped.exit_code


def _extends(lists: Sequence[str], survey: tuning.Survey, folder: Path) -> list[str]:
    """Return the lists that the runs used, as names for ``extends``."""
    base = "bf16" if survey.dtype == "bfloat16" else "default"
    sources = load_table(list(lists), base=base, device_type=survey.device_type).sources
    # Lists of packages lie over every base.
    packages = {str(package.file) for package, _ in package_tables()}
    shipped = [Path(source).stem for source in sources if source.startswith("lists/")]
    files = [source for source in sources if not source.startswith("lists/") and source not in packages]
    return [*(shipped[1:] or shipped), *(os.path.relpath(file, folder) for file in files)]


def bisect(chosen: argparse.Namespace) -> int:
    """Search, and print the lines for autoamp.toml on stdout, everything else on stderr. Returns the exit code."""
    with program_runs(chosen) as runs:
        say(f"surveying {chosen.survey_steps} steps of {chosen.program} in fp32")
        units = tuning.units_of(runs.survey(runs.budget / 2, timing=0.0))
        say(f"{len(units)} modules and ops are candidates")
        seeds = (chosen.seed, chosen.seed + 1)
        search = tuning.Bisection(run=runs.run, seeds=seeds, tolerance=chosen.tolerance, units=units)
        search.search()
    lines = search.figures(chosen.metric)
    if search.listed is not None:
        lines.append(f"allowed difference from fp32: {search.allowed:.3g}")
        if not search.is_wrong:
            lines.append("half precision is within the allowed difference: no rule has to change")
    lines.append(f"{runs.made} runs")
    if search.stopped is not None:
        lines.append(f"stopped early: {search.stopped}" + ("; fewer entries may be enough" if search.chosen else ""))
    elif search.is_wrong and not search.chosen:
        lines.append(_NOT_RESTORED)
    for line in lines:
        say(line)
    if search.chosen:
        sys.stdout.write(tuning.list_text(search.chosen, comments=lines))
    return int(search.is_wrong and not search.chosen) if search.stopped is None else search.stopped.exit_code


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
    kind = Settings.from_arguments(chosen.lists or None, chosen.device_type, chosen.dtype).device_type
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

    def survey(self, seconds: float, *, timing: float) -> tuning.Survey:
        """Run the first steps in fp32, and return what they call.

        Args:
            seconds: How long the program runs at most.
            timing: How long its ops are timed after that at most.

        Raises:
            UsageError: The program fails, or the budget was spent first.
            SystemExit: A signal interrupted it.
        """
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
            SystemExit: The run is in fp32, and failed or told no finite metric, so no list can be compared with it.
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
        outcome = tuning.Outcome((math.nan if metric is None else metric,), found.get("seconds"), failed)
        name = self._chosen.metric
        if candidate is not None:
            return outcome
        if failed is not None:
            why = f"the program fails in fp32: {failed}; repair that first"
        elif metric is None:
            names = tuning.printed_names(output)
            printed = f"; it prints {', '.join(names[:8])}" if names else ""
            why = (
                f"the program reported no metric {name!r} in fp32; name a value that it prints, print a line "
                f"such as '{name}: 0.5', or call autoamp.report_metric({name!r}, value){printed}"
            )
        elif not math.isfinite(metric):
            why = f"the metric {name!r} is nan or inf in fp32; no list can be compared with that"
        else:
            return outcome
        say(f"{why}. Nothing was written", wrong=True)
        raise SystemExit(1)

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
        command = [sys.executable, "-m", "autoamp.cli.searches", json.dumps(spec)]
        with open(files["out"], "wb") as out, open(files["err"], "wb") as err:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
            try:
                code = child.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise tuning.Stopped("the budget was spent") from None
            finally:
                # Whatever else ends the wait also ends the child and all that it started.
                if child.poll() is None:
                    # On Windows a process has no group.
                    os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
                    child.wait()
        written = pickle.loads(files["outcome"].read_bytes()) if files["outcome"].exists() else {}
        printed, errors = (files[name].read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no word on stderr")
        # tqdm writes to stderr.
        return written, None if code == 0 else f"exit code {code}: {last[:200]}", errors + "\n" + printed


def run_in_child(text: str) -> None:
    """Run the program once, and write the outcome. An exception of the program propagates after that.

    Args:
        text: JSON of the parsed command line with the lists and the seed of this run, the options of `autoamp run`, the
            mode (``"survey"``, ``"fp32"`` or ``"lists"``), and the file for the outcome.
    """
    spec = argparse.Namespace(**json.loads(text))
    take_path(spec)
    options = Options.from_command_line(spec)
    run = set_up(options)
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    run_program = prepared(spec, asdict(options))
    outcome: dict[str, Any] = {}
    process = os.getpid()
    try:
        if spec.mode == "survey":
            outcome["survey"] = _surveyed(run_program, run, spec)
        else:
            outcome["seconds"] = _timed(run_program, run, in_fp32=spec.mode == "fp32")
    finally:
        # Forks of the program end here too.
        if os.getpid() == process:
            Path(spec.outcome).write_bytes(pickle.dumps(outcome))


def _surveyed(run_program: Callable[[], None], run: Run, spec: argparse.Namespace) -> tuning.Survey:
    """Run the program up to the end of the survey, and return that."""
    surveyors: list[tuning.Surveyor] = []
    with contextlib.ExitStack() as stack:

        def begin(handle: BaseHandle) -> None:
            surveyors.append(tuning.Surveyor(handle, steps=spec.survey_steps, seconds=spec.seconds))
            stack.enter_context(surveyors[-1])

        run.follow(begin)
        with contextlib.suppress(tuning.SurveyEnded, SystemExit):
            run_program()
    return max(surveyors, key=lambda one: one.seen).survey(spec.timing)


def _timed(run_program: Callable[[], None], run: Run, *, in_fp32: bool) -> float | None:
    """Run the program, and return the seconds of a step, or of all if it has no optimizer; None for too few steps."""
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        if in_fp32:
            run.follow(lambda handle: stack.enter_context(handle.disable_casts()))
        stack.enter_context(listen(optimizer_returned=lambda *_: times.append(time.perf_counter())))
        start = time.perf_counter()
        try:
            run_program()
        except SystemExit as ended:
            # Programs end so after success too.
            if ended.code not in (None, 0):
                raise
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
    steps = [after - before for before, after in itertools.pairwise(times)][_WARM_UP:]
    handle = core.current_handle() or run.handle
    has_optimizer = bool(times) or handle.skipped_steps > 0
    return statistics.median(steps) if steps else None if has_optimizer else spent


if __name__ == "__main__":
    run_in_child(sys.argv[1])
