"""Scripts of the public kind, which know nothing of mixed precision, end under `autoamp run` as under plain Python.

They are in the folder unedited, and are never to be changed for the sake of autoamp.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.launches import Ended, launched

FOLDER = Path(__file__).with_name("unedited")
# In the default suite: what numpy, masks, hooks, hand-written steps and preallocated tensors need.
USUAL = ("feature_hooks", "from_scratch", "save_predictions", "transformer")
OTHERS = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in USUAL))
# What half precision does not compute closely whoever casts, so that the end alone is compared.
ONLY_ENDS = {("pinn", "bf16"): "second derivatives of a network, whose 8 bits are lost in their difference"}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


@functools.cache
def ended(scripts: tuple[str, ...]) -> dict[str, Ended]:
    """Run the scripts in each mode, all from one process."""
    runs = {f"plain {script}": ["python", f"{script}.py"] for script in scripts}
    for mode in ("fp16", "bf16"):
        runs |= {f"{mode} {script}": ["run", "--dtype", mode, f"{script}.py"] for script in scripts}
    return launched(FOLDER, runs, ["sklearn.cluster", "sklearn.datasets"])


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("script", [*USUAL, *(pytest.param(name, marks=pytest.mark.variants) for name in OTHERS)])
def test_a_script_ends_as_under_plain_python(script: str, mode: str) -> None:
    runs = ended(USUAL if script in USUAL else OTHERS)
    plain, found = runs[f"plain {script}"], runs[f"{mode} {script}"]
    assert plain.code == 0, plain.err
    assert found.code == 0, found.err
    assert "autoamp: " + {"fp16": "float16", "bf16": "bfloat16"}[mode] in found.err
    if (script, mode) in ONLY_ENDS:
        return
    assert NUMBER.sub("#", found.out) == NUMBER.sub("#", plain.out)
    numbers = [[float(number) for number in NUMBER.findall(run.out)] for run in (plain, found)]
    assert numbers[1] == pytest.approx(numbers[0], rel=0.1, abs=0.05)
