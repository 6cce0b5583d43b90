"""Measures steps of real models in each way and prints a table in Markdown: ``python -m tests.benchmarks``.

Each way is a program in a process of its own (`tests.benchmarks.program`), because what the C library keeps of freed
memory belongs to a process. The ways of a case take turns, so that a slow moment of the machine hits all of them; fresh
processes take their place after some turns. A ratio is the median of the ratios to torch.autocast in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.models import CASES

RUN = ("-m", "autoamp", "run", "--quiet", "--device-type", "cpu", "--dtype", "bf16")
BASE = "autocast"
COMMON = {
    "fp32": ((), ()),
    BASE: ((), ("--autocast",)),
    "autocast, memory kept": ((), ("--autocast", "--keep-memory")),
    "autocast, compiled": ((), ("--autocast", "--compile")),
    "autoamp run": (RUN, ()),
    "autoamp run, compiled": (RUN, ("--compile",)),
}
# By kind of a run and by way: the command before the program, and the program's options.
WAYS = {
    "training": {**COMMON, "autoamp run, O2": ((*RUN, "--opt-level", "O2"), ("--apex",))},
    "evaluation": {**COMMON, "autoamp run, inference()": (RUN, ("--inference",))},
}
COLUMNS = ("ms", "of autocast", "middle half", "peak MiB", "saved MiB", "page faults", "loss")


class Worker:
    """The program in one way, and what it has answered.

    Attributes:
        loss: That of the last of its first steps.
    """

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        # One process compiles, so that the peak is the program's own.
        variables = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._errors = errors
        with errors.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
                env=variables,
            )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> dict[str, float]:
        """Wait for an answer. Raises RuntimeError where the program has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("".join(self._errors.read_text().strip().splitlines()[-1:]) or "it ended")
        found: dict[str, float] = json.loads(line)
        return found

    def asked(self, question: object) -> dict[str, float]:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return self.read()

    def peak(self) -> float:
        """Return the most MiB of physical memory that the process has held."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) / 1024


def measured(case: str, kind: str, ways: Sequence[str], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Return by way what each of some rounds gave in fresh processes, or the error of a program that failed."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = {}
        for number, way in enumerate(ways):
            before, options = WAYS[kind][way]
            command = (*before, "-m", "tests.benchmarks.program", case, kind, *options)
            workers[way] = stack.enter_context(Worker(command, Path(folder, str(number))))

        def asked(way: str, question: object = None) -> dict[str, float]:
            try:
                return workers[way].read() if question is None else workers[way].asked(question)
            except (RuntimeError, BrokenPipeError) as error:
                found[way] = {"error": str(error)}
                del workers[way]
                return {}

        for way in ways:
            found[way] = {"seconds": [], "faults": []}
            answer = asked(way)
            found[way] |= answer
        for _ in range(rounds):
            for way in list(workers):
                for name, value in asked(way, seconds).items():
                    found[way][name].append(value)
        for way in list(workers):
            found[way]["peak"] = workers[way].peak()
            if kind == "training" and "compiled" not in way:
                answer = asked(way, "saved")
                found[way] |= answer
    return found


def row(case: str, kind: str, way: str, runs: Sequence[dict[str, dict[str, Any]]]) -> str:
    """Return a way's line of the table: medians over all rounds of all processes."""
    failed = [run[way]["error"] for run in runs if "error" in run[way]]
    if failed:
        return f"| {case} | {kind} | {way} | failed: {failed[0]} |" + " |" * (len(COLUMNS) - 1)
    times, bases = ([second for run in runs for second in run[one].get("seconds", ())] for one in (way, BASE))
    ratios = [time / base for time, base in zip(times, bases, strict=False)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [float("nan")] * 3
    last = runs[-1][way]
    cells = (
        f"{statistics.median(times) * 1e3:.3g}",
        f"{middle:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{max(run[way]['peak'] for run in runs):.0f}",
        f"{last['bytes'] / 2**20:.1f}" if "bytes" in last else "",
        f"{statistics.median(fault for run in runs for fault in run[way]['faults']):,.0f}",
        f"{last['loss']:.4f}",
    )
    return " | ".join(("", case, kind, way, *cells, "")).strip()


def main() -> None:
    """Measure and print, each row as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="about 10 minutes: one process, few rounds, little compiled"
    )
    parser.add_argument(
        "--processes", type=int, default=3, help="how many times fresh processes are started; default 3"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each of them, 2 or more; default 5")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a turn takes; default 1")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases, kinds and ways that have it: 'ResNet'")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.processes, chosen.rounds, chosen.seconds = 1, 3, 0.25
    machine = f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
    print(f"{machine}; Python {platform.python_version()}, torch {torch.__version__}, bf16\n")
    print("| case | run | way |", *(f"{column} |" for column in COLUMNS))
    print("|---|---|---|" + "---:|" * len(COLUMNS), flush=True)
    for name, case in CASES.items():
        for kind, ways in WAYS.items():
            compiled = case.compiled or not chosen.quick
            wanted = [
                way for way in ways if chosen.only in f"{name}, {kind}, {way}" and (compiled or "compiled" not in way)
            ]
            if not wanted:
                continue
            needed = dict.fromkeys((BASE, *wanted))
            runs = [measured(name, kind, list(needed), chosen.rounds, chosen.seconds) for _ in range(chosen.processes)]
            print("\n".join(row(name, kind, way, runs) for way in wanted), flush=True)


if __name__ == "__main__":
    main()
