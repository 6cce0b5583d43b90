"""Puts small faults into a part of the core, one by one, and counts those that its tests find.

python -m tests.mutation rules patching          60 mutants of each part, drawn by a fixed seed
python -m tests.mutation scaling --sample 200    more of one; --sample 0 is all of them
python -m tests.mutation rules --seed 2          others

Takes `pip install -e '.[mutation]'`. The faults go into a copy of the tree. For each one those tests run that
execute its line. Ends with an error where fewer than 85 % of the mutants are found, or where an entry of
equivalent.toml is wrong.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

from tests.mutation.selection import Selection

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
LOWEST_SCORE = 0.85

# What the product does in a step, by its public functions.
STEPS = [
    f"tests/behaviour/test_{page}.py"
    for page in ("accumulation", "checkpoints", "clipping", "diagnostics", "ema", "gan", "opt_levels", "schedulers")
]
# The tests that concern each part of the core.
TESTS = {
    "rules": ["tests/core/rules", "tests/behaviour/test_lists.py", "tests/behaviour/test_tuned_list.py"],
    "patching": ["tests/core/patching", "tests/core/runtime/test_patched_torch.py"],
    "casting": [
        "tests/core/casting",
        "tests/property/test_casts.py",
        "tests/core/test_inference.py",
        "tests/integration/test_stale_cache.py",
        "tests/core/modules/test_recompute.py",
        "tests/core/modules/test_scope.py",
    ],
    "ops": [
        "tests/core/ops",
        "tests/property/test_casts.py",
        "tests/core/test_inference.py",
        "tests/integration/test_compilers.py::test_ops_that_torch_does_not_compile_are_not_compiled_by_themselves",
    ],
    "scaling": [
        "tests/core/scaling",
        "tests/core/stepping/test_optimizers.py",
        "tests/integration/test_device_steps.py",
        *STEPS,
    ],
    "stepping": [
        "tests/core/stepping",
        *STEPS,
        "tests/core/auto_scaling",
        "tests/property/test_steps.py",
        "tests/integration/test_device_steps.py",
        "tests/integration/test_several_calls.py",
        "tests/integration/test_misuse.py::test_a_warning_gives_the_value_the_rule_and_the_remedy_once",
        "tests/integration/test_misuse.py::test_what_is_right_is_not_told",
        "tests/apex/levels",
        "tests/apex/fp16_utils",
        "tests/core/runtime",
    ],
    "ranks": [
        '-m "processes or not processes"',
        "tests/core/stepping/test_replicas.py",
        "tests/core/stepping/test_sync.py",
        "tests/integration/test_wrappers.py",
        "tests/core/stepping/test_rank_consistency.py",
    ],
    "auto_scaling": [
        "tests/core/auto_scaling",
        "tests/core/stepping/test_closures.py",
        "tests/core/stepping/test_optimizer_steps.py",
        "tests/property/test_steps.py",
    ],
}
# The files of each part.
FILES = {
    "rules": "loader rules",
    "patching": "patches",
    "casting": "casts",
    "ops": "patched_torch policies scope special_calls targets",
    "scaling": "gradients loss_scale",
    "stepping": "attach block guard masters closures nonfinite optimizers steps",
    # Tests with several ranks take long.
    "ranks": "ranks",
    "auto_scaling": "auto_scale backward_pass",
}
# What these do to numbers and strings that are compared depends on which objects Python shares. And what is compared by
# identity (None, classes, functions, dtypes, layouts) is equal to itself alone.
POINTLESS = (
    "core/ReplaceComparisonOperator_Eq_Is",
    "core/ReplaceComparisonOperator_NotEq_Is",
    "core/ReplaceComparisonOperator_Is_Eq",
    "core/ReplaceComparisonOperator_IsNot_NotEq",
)


def copied_tree(folder: Path) -> None:
    """Copy the files of the repository that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def pointless_places(source: str) -> set[tuple[int, int]]:
    """Return the places in a source text, each by line and column, at which a mutant changes nothing on a CPU.

    Nobody evaluates annotations, nor the classes of `typing.Protocol`. Lengths that `zip` compares are equal, and
    copies on a CPU block. A bare star in a signature that becomes a slash allows calls that nobody makes.
    """
    stars = enumerate(source.splitlines(), start=1)
    found = {(number, match.start()) for number, line in stars for match in re.finditer(r"\*,", line)}
    for node in ast.walk(ast.parse(source)):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.keyword) and node.arg in ("strict", "non_blocking"):
            notes.append(node.value)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases):
            notes += [part for part in ast.walk(node) if isinstance(part, (ast.expr, ast.stmt))]
        for note in notes:
            if note is None:
                continue
            for line in range(note.lineno, note.end_lineno + 1):
                begin = note.col_offset if line == note.lineno else 0
                end = note.end_col_offset if line == note.end_lineno else 200
                found.update((line, column) for column in range(begin, end))
    return found


def chosen(database: Any, folder: Path, size: int, seed: int) -> set[str]:
    """Return the jobs to run: one mutant at each place, then another, until there are enough."""
    pointless: dict[Path, set[tuple[int, int]]] = {}
    places: dict[Any, list[str]] = {}
    for item in sorted(database.work_items, key=lambda item: _order(item.mutations[0])):
        mutation = item.mutations[0]
        path = mutation.module_path
        if path not in pointless:
            pointless[path] = pointless_places((folder / path).read_text(encoding="utf-8"))
        if mutation.start_pos not in pointless[path] and not mutation.operator_name.startswith(POINTLESS):
            places.setdefault((path, mutation.start_pos), []).append(item.job_id)
    numbers = random.Random(seed)
    jobs = list(places.values())
    numbers.shuffle(jobs)
    for some in jobs:
        numbers.shuffle(some)
    rounds = [some[place] for place in range(max(map(len, jobs))) for some in jobs if place < len(some)]
    return set(rounds[:size] if size else rounds)


def _order(mutation: Any) -> tuple[Any, ...]:
    return str(mutation.module_path), mutation.start_pos, mutation.operator_name, mutation.occurrence


def changed_lines(before: str, after: str) -> tuple[str, str]:
    """Return the line that a mutant changes, before and after."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    was = [line[1:].strip() for line in lines if line.startswith("-")]
    becomes = [line[1:].strip() for line in lines if line.startswith("+")]
    return " ".join(was), " ".join(becomes)


def results(package: str, size: int, seed: int) -> Iterator[tuple[str, int, str, str, bool]]:
    """Run the mutants of a package.

    Yields the file, the line's number, the line before and after, and whether a test found the mutant.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied_tree(folder)
        modules = [f"autoamp/core/{file}.py" for file in FILES[package].split()]
        (folder / "mutation.toml").write_text(
            f"[cosmic-ray]\nmodule-path = {modules}\ntimeout = 300.0\nexcluded-modules = []\n"
            "test-command = ''\n[cosmic-ray.distributor]\nname = 'local'\n",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "cosmic_ray.cli", "init", "mutation.toml", "session.sqlite"]
        subprocess.run(command, cwd=folder, check=True)
        with use_db(str(folder / "session.sqlite"), WorkDB.Mode.open) as database:
            jobs = chosen(database, folder, size, seed)
            mutations = [item.mutations[0] for item in database.work_items if item.job_id in jobs]
        selection = Selection(folder, " ".join(TESTS[package]))
        for number, mutation in enumerate(mutations, start=1):
            path = folder / mutation.module_path
            operator = get_operator(mutation.operator_name)(**mutation.operator_args)
            with use_mutation(path, operator, mutation.occurrence) as (before, after):
                # Compiled code is kept by the time of its source, in seconds.
                os.utime(path, (number, number))
                found = selection.finds(path, mutation.start_pos[0])
            yield str(mutation.module_path), mutation.start_pos[0], *changed_lines(before, after), found


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="+", choices=TESTS)
    parser.add_argument("--sample", type=int, default=60, help="mutants of each package; 0 is all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    equivalent = {(entry["file"], entry["was"], entry["becomes"]) for entry in entries}
    failed = False
    for package in options.packages:
        found = missed = known = wrong = 0
        for path, line, was, becomes, was_found in results(package, options.sample, options.seed):
            is_known = (path, was, becomes) in equivalent
            found += was_found
            missed += not was_found and not is_known
            known += not was_found and is_known
            wrong += was_found and is_known
            if was_found == is_known:
                title = "found, though equivalent.toml has it" if was_found else "not found"
                print(f"{title}: {path}:{line}\n    - {was}\n    + {becomes}", flush=True)
        score = found / max(1, found + missed)
        print(f"{package}: {found} of {found + missed} mutants found, {score:.0%}; {known} are equivalent", flush=True)
        failed |= score < LOWEST_SCORE or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
