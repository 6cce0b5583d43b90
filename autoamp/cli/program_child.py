"""One run of a program for `autoamp tune` or `bisect`: ``python -m autoamp.cli.program_child SPEC``.

SPEC is JSON: the parsed command line with the lists and the seed of this run, the options of `autoamp run`, the mode
(``"survey"``, ``"fp32"`` or ``"lists"``), and the file for the outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoamp import runtime
from autoamp.cli.launch import prepared, take_path
from autoamp.cli.session import Options, Run, set_up
from autoamp.program import listen
from autoamp.runtime import BaseHandle
from autoamp.tuning import Survey, SurveyEnded, Surveyor, number_in

# The first steps also allocate memory and compile kernels, so they are not timed.
_WARM_UP = 2


def main(text: str) -> None:
    """Run the program, and write the outcome. An exception of the program propagates after that."""
    spec = argparse.Namespace(**json.loads(text))
    take_path(spec)
    options = Options.from_command_line(spec)
    run = set_up(options)
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    program_runs = prepared(spec, asdict(options))
    outcome: dict[str, Any] = {}
    process = os.getpid()
    try:
        if spec.mode == "survey":
            outcome["survey"] = _surveyed(program_runs, run, spec)
        else:
            outcome["seconds"] = _timed(program_runs, run, in_fp32=spec.mode == "fp32")
    finally:
        # Forks of the program end here too.
        if os.getpid() == process:
            value = vars(sys.modules["__main__"]).get(spec.metric)
            outcome["variable"] = None if value is None else number_in(value)
            Path(spec.outcome).write_bytes(pickle.dumps(outcome))


def _surveyed(program_runs: Callable[[], None], run: Run, spec: argparse.Namespace) -> Survey:
    """Run the program up to the end of the survey, and return that."""
    surveyors: list[Surveyor] = []
    with contextlib.ExitStack() as stack:

        def begin(handle: BaseHandle) -> None:
            surveyors.append(Surveyor(handle, steps=spec.survey_steps, seconds=spec.seconds))
            stack.enter_context(surveyors[-1])

        stack.callback(run.follow(begin))
        with contextlib.suppress(SurveyEnded, SystemExit):
            program_runs()
    return max(surveyors, key=lambda one: one.seen).survey(spec.timing)


def _timed(program_runs: Callable[[], None], run: Run, *, in_fp32: bool) -> float | None:
    """Run the program, and return the seconds of a step, or of all if it has no optimizer; None for too few steps."""
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        if in_fp32:
            stack.callback(run.follow(lambda handle: stack.enter_context(handle.disable_casts())))
        stack.enter_context(listen(optimizer_returned=lambda *_: times.append(time.perf_counter())))
        start = time.perf_counter()
        try:
            program_runs()
        except SystemExit as ended:
            # Programs end so after success too.
            if ended.code not in (None, 0):
                raise
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
    steps = [after - before for before, after in itertools.pairwise(times)][_WARM_UP:]
    handle = runtime.current_handle() or run.handle
    has_optimizer = bool(times) or handle.skipped_steps > 0
    return statistics.median(steps) if steps else None if has_optimizer else spent


if __name__ == "__main__":
    main(sys.argv[1])
