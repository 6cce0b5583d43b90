"""Prints what each call costs, plain, under torch.autocast and under autoamp: ``python -m tests.benchmarks``.

Each way has a process of its own, and these take turns in each round, so that a slow moment of the machine hits all of
them. Now and then fresh ones take their place, since the layout of memory makes a difference too. A ratio is that of
the medians over all rounds; its spread is the middle half of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autoamp
from tests.benchmarks import diagnostics, framework, memory, o2, ranks
from tests.benchmarks.workers import NAMES, WAYS, asked, cycling, started, timing

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
Timings = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure, print and, if asked for, write the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds with the same processes, 2 or more")
    parser.add_argument("--processes", type=int, default=4, help="how many times fresh processes are started")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--json", type=Path, help="write the results, with versions, to this file")
    parser.add_argument(
        "--only", choices=["calls", "runs", "o2", "memory", "growth", "diagnostics", "ranks"], help="one part of it all"
    )
    parser.add_argument("--big", action="store_true", help="real work too, some minutes")
    parser.add_argument("--svg", type=Path, help="draw how the cost of a step grows; takes matplotlib")
    chosen = parser.parse_args()
    console = Console()
    found: dict[str, Any] = environment(chosen.dtype)
    if chosen.only in (None, "calls"):
        timings, once = measure(chosen.dtype, chosen.rounds, chosen.processes, console)
        console.print(table(timings, f"One call, {chosen.dtype}"), table_of_what_is_done_once(once))
        found |= report(timings, once)
    if chosen.only in (None, "runs"):
        for device in DEVICES:
            runs_ = measure_runs(chosen.dtype, device, chosen.rounds, chosen.processes, chosen.big, console)
            console.print(table(runs_, f"One run, {chosen.dtype} on {device}"))
            found[f"runs on {device}"] = {name: {**ways, "ratio": ratio(ways)} for name, ways in runs_.items()}
        starts = list(zip(*(framework.start_up() for _ in range(5)), strict=True))
        found["start"] = dict(zip(("import autoamp, on top of torch", "the first init()"), starts, strict=True))
        console.print(table_of_what_is_done_once(found["start"]))
    if chosen.only in (None, "o2"):
        steps, moved = measure_steps(chosen.rounds, chosen.processes, console)
        console.print(table_of_steps(steps, moved))
        found["O2"] = {name: {"seconds": ways, "bytes": moved[name]} for name, ways in steps.items()}
    if chosen.only in (None, "memory"):
        found["saved bytes"] = memory.compare()
        for name, values in found["saved bytes"].items():
            console.print(f"saved for backward, {name}: {values}")
    if chosen.only in (None, "growth"):
        found["growth"] = framework.growth()
        console.print(found["growth"])
        if chosen.svg is not None:
            framework.draw(found["growth"], chosen.svg)
    if chosen.only in (None, "diagnostics"):
        found["diagnostics"] = diagnostics.measure(chosen.dtype, chosen.rounds)
        console.print(table_of_tools(found["diagnostics"]))
    if chosen.only in (None, "ranks"):
        with tempfile.TemporaryDirectory() as folder:
            found["ranks"] = ranks.measure(chosen.rounds, chosen.processes, Path(folder))
        console.print(table_of_ranks(found["ranks"]))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(dtype: str, rounds: int, processes: int, console: Console) -> tuple[Timings, dict[str, list[float]]]:
    """Return the seconds of a call by case and way, and those of ``init()`` and ``deactivate()``; a value a round."""
    timings: Timings = {name: {way: [] for way in WAYS} for name in NAMES}
    once: dict[str, list[float]] = {"init(), the first": [], "init()": [], "deactivate()": []}
    for number in track(range(rounds * processes), description="Measuring", console=console):
        if number % rounds == 0:
            connections = {way: started(timing, way, dtype) for way in WAYS}
            cycles = started(cycling, dtype)
        for name in NAMES:
            for way in WAYS:
                timings[name][way].append(asked(connections[way], name))
        init, deactivate = asked(cycles, "cycle")
        once["init(), the first" if number % rounds == 0 else "init()"].append(init)
        once["deactivate()"].append(deactivate)
    return timings, once


def measure_runs(dtype: str, device: str, rounds: int, processes: int, big: bool, console: Console) -> Timings:
    """Return the seconds of each run by name and way, a value a round."""
    names = [*framework.runs(big, device, getattr(torch, dtype)), framework.CHECK]
    timings: Timings = {name: {way: [] for way in WAYS} for name in names}
    for number in track(range(rounds * processes), description=f"Runs on {device}", console=console):
        if number % rounds == 0:
            connections = {way: started(framework.running, way, dtype, device, big) for way in WAYS}
        for name in names:
            for way in WAYS:
                timings[name][way].append(asked(connections[way], name))
    return timings


def measure_steps(rounds: int, processes: int, console: Console) -> tuple[Timings, dict[str, dict[str, float]]]:
    """Return the seconds of each step of O2 by name and way, a value a round, and its bytes for each parameter."""
    timings: Timings = {step.name: {way: [] for way in o2.ways()} for step in o2.STEPS}
    for number in track(range(rounds * processes), description="O2", console=console):
        if number % rounds == 0:
            connections = {way: o2.start(way) for way in o2.ways()}
        for name, ways in timings.items():
            for way in ways:
                ways[way].append(asked(connections[way], name))
    moved = {name: {way: asked(connections[way], o2.BYTES + name) for way in ways} for name, ways in timings.items()}
    return timings, moved


def table_of_steps(timings: Timings, moved: dict[str, dict[str, float]]) -> Table:
    """Return a table of training steps at O2: medians in milliseconds, ratios, and bytes for each parameter."""
    shown = Table(title="A training step at O2, bfloat16 on a CPU, one thread, milliseconds; bytes a parameter")
    shown.add_column("")
    ways = list(next(iter(timings.values())))
    headings = [f"{way}, {what}" for way in ways[1:] for what in ("ms", "ratio", "middle half", "bytes")]
    for heading in (f"{ways[0]}, ms", "bytes", *headings):
        shown.add_column(heading, justify="right")
    for name, seconds in timings.items():
        row = [f"{statistics.median(seconds[ways[0]]) * 1e3:.2f}", f"{moved[name][ways[0]]:.1f}"]
        for way in ways[1:]:
            over, low, high = ratio(seconds, way)
            median = statistics.median(seconds[way]) * 1e3
            row += [f"{median:.2f}", f"{over:.2f}", f"{low:.2f}-{high:.2f}", f"{moved[name][way]:.1f}"]
        shown.add_row(name, *row)
    return shown


def ratio(ways: dict[str, list[float]], way: str = "autoamp") -> tuple[float, float, float]:
    """Return the ratio of a way's median over autocast's, and the quartiles of the ratios by round."""
    low, _, high = statistics.quantiles([one / other for one, other in zip(ways[way], ways["autocast"], strict=True)])
    return statistics.median(ways[way]) / statistics.median(ways["autocast"]), low, high


def table(timings: Timings, title: str) -> Table:
    """Return a table of the medians, in microseconds."""
    shown = Table(title=f"{title}, one thread, microseconds")
    shown.add_column("")
    for heading in (*WAYS, "ratio", "middle half"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, ways in timings.items():
        medians = [f"{statistics.median(ways[way]) * 1e6:.2f}" for way in WAYS]
        over, low, high = ratio(ways)
        shown.add_row(name, *medians, f"{over:.2f}", f"{low:.2f}-{high:.2f}")
    return shown


def table_of_what_is_done_once(once: dict[str, list[float]]) -> Table:
    """Return a table of ``init()`` and ``deactivate()``, in milliseconds."""
    table = Table("", "median", "lowest", title="Once, milliseconds")
    for name, seconds in once.items():
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.1f}", f"{min(seconds) * 1e3:.1f}")
    return table


def table_of_tools(found: dict[str, dict[int, list[float]]]) -> Table:
    """Return a table of what each tool costs: medians over the step without it, and the middle half of rounds."""
    widths = list(next(iter(found.values())))
    shown = Table("", *(f"width {width}" for width in widths), title="A training step with it, over one without")
    for name, ratios in found.items():
        cells = []
        for width in widths:
            low, middle, high = statistics.quantiles(ratios[width], n=4)
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        shown.add_row(name, *cells)
    return shown


def table_of_ranks(found: dict[str, dict[str, Any]]) -> Table:
    """Return a table of steps on several ranks: medians in milliseconds, ratios by round, collectives and calls."""
    shown = Table(
        title="A training step on several ranks, float16 on a CPU over gloo: torch.amp / autoamp, milliseconds"
    )
    shown.add_column("ranks", no_wrap=True)
    for part in ("step", "after backward", "of which scaling"):
        shown.add_column(part, justify="right")
        shown.add_column("ratio (middle half)", justify="right")
    for heading in (ranks.COLLECTIVES, ranks.CALLS):
        shown.add_column(heading, justify="right")
    for name, ways in found.items():
        row = []
        for part in ranks.PARTS:
            theirs, own = (ways[way][part] for way in ranks.WAYS)
            low, middle, high = statistics.quantiles([one / other for one, other in zip(own, theirs, strict=True)])
            row.append(f"{statistics.median(theirs) * 1e3:.3g} / {statistics.median(own) * 1e3:.3g}")
            row.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        counted = (" / ".join(str(ways[way][what]) for way in ranks.WAYS) for what in (ranks.COLLECTIVES, ranks.CALLS))
        shown.add_row(name, *row, *counted)
    return shown


def environment(dtype: str) -> dict[str, Any]:
    """Return what the results were measured on: versions and the kind of machine, not its name."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "autoamp": autoamp.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "dtype": dtype,
    }


def report(timings: Timings, once: dict[str, list[float]]) -> dict[str, Any]:
    """Return all timings of calls, in seconds."""
    return {
        "calls": timings,
        "ratios": {
            name: dict(zip(("ratio", "low", "high"), ratio(ways), strict=True)) for name, ways in timings.items()
        },
        "once": once,
    }


if __name__ == "__main__":
    main()
