"""Scripts of the public kind, which know nothing of mixed precision, end under `autoamp run` as under plain Python.

They are in the folder unedited, and are never to be changed for the sake of autoamp. All of a mode run in one process,
each in a fork (`tests.integration.batch`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# In the default suite: what numpy, masks, hooks, hand-written steps and preallocated tensors need.
USUAL = ("feature_hooks", "from_scratch", "save_predictions", "transformer")
OTHERS = tuple(sorted(path.stem for path in (HERE / "unedited").glob("*.py") if path.stem not in USUAL))
NEEDS = {"pandas_report": "pandas", "plot_curves": "matplotlib"}
# What half precision does not compute closely whoever casts, so that the end alone is compared.
ONLY_ENDS = {("pinn", "bf16"): "second derivatives of a network, whose 8 bits are lost in their difference"}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


@functools.cache
def ran(mode: str, scripts: tuple[str, ...]) -> Any:
    """Run the scripts in a mode, and return what became of each."""
    there = [str(HERE / "unedited" / f"{script}.py") for script in scripts if _is_here(NEEDS.get(script))]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.batch", mode, *there],
        cwd=HERE.parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return json.loads(ended.stdout)


def _is_here(module: str | None) -> bool:
    required = os.environ.get("AUTOAMP_CLIENTS") == "required"
    return module is None or required or importlib.util.find_spec(module) is not None


def check(script: str, mode: str, scripts: tuple[str, ...]) -> None:
    """Compare a script's run with that under plain Python."""
    if not _is_here(NEEDS.get(script)):
        pytest.skip(f"needs {NEEDS[script]}")
    plain, found = ran("plain", scripts)[script], ran(mode, scripts)[script]
    assert plain["code"] == 0, plain["err"]
    assert found["code"] == 0, found["err"]
    assert "autoamp: " + {"fp16": "float16", "bf16": "bfloat16"}[mode] in found["err"]
    if (script, mode) in ONLY_ENDS:
        return
    assert NUMBER.sub("#", found["out"]) == NUMBER.sub("#", plain["out"])
    numbers = [[float(number) for number in NUMBER.findall(run["out"])] for run in (plain, found)]
    assert numbers[1] == pytest.approx(numbers[0], rel=0.1, abs=0.05)


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("script", USUAL)
def test_a_script_ends_as_under_plain_python(script: str, mode: str) -> None:
    check(script, mode, USUAL)


@pytest.mark.unedited
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("script", OTHERS)
def test_each_other_script_does_too(script: str, mode: str) -> None:
    check(script, mode, OTHERS)
