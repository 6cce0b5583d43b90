"""Whose precision rules: programs that cast or scale by themselves, beside plain Python, and programs that do not.

torch.autocast, a half model, `FP16_Optimizer` and `amp.initialize` cast; then autoamp casts and scales nothing.
`GradScaler.scale()` scales; then autoamp casts alone.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration import own_precision
from tests.launches import launched

SCRIPT = "own_precision.py"
OWN, CAST, SCALED = tuple(own_precision.OWN), tuple(own_precision.CAST), (*own_precision.SCALED, *own_precision.EARLY)


@functools.cache
def found(way: str, half: str) -> dict[str, Any]:
    """Run the programs: all of them in one process, which forks for each."""
    options = ["--quiet", "--device-type", "cpu", "--dtype", {"float16": "fp16", "bfloat16": "bf16"}[half]]
    line = ["run", *options, SCRIPT, "plain"] if way == "run" else ["python", SCRIPT, way]
    ended = launched(Path(__file__).parent, {way: [*line, half]})[way]
    assert ended.code == 0, ended.err
    results: dict[str, Any] = json.loads(ended.out)
    return results


HALVES = pytest.mark.parametrize("half", ["float16", "bfloat16"])
BY_MODULES = pytest.mark.parametrize("way", ["run", "modules"])


@HALVES
@BY_MODULES
@pytest.mark.parametrize("name", OWN)
def test_a_program_that_casts_itself_ends_as_under_plain_python(name: str, way: str, half: str) -> None:
    """Bit for bit, and its loss has its own scale alone."""
    assert found(way, half)[name] == found("plain", half)[name]


@HALVES
@BY_MODULES
@pytest.mark.parametrize("name", [*CAST, *SCALED])
def test_a_program_that_does_not_cast_is_cast(name: str, way: str, half: str) -> None:
    """As `init()` casts it, with one loss scale: its own, or else ours."""
    (notes, scales), (expected, _) = found(way, half)[name], found("global", half)[name]
    losses, dtypes = split(notes)
    assert losses == pytest.approx(split(expected)[0], rel=0.01)
    assert dtypes == split(expected)[1]
    ours = 65536.0 if half == "float16" else 1.0
    assert scales == [128.0 if name in SCALED else ours] * 3


@HALVES
@pytest.mark.parametrize("name", [*OWN, *CAST, *SCALED])
def test_init_trains_every_program_with_its_own_scale(name: str, half: str) -> None:
    """Close to plain Python, also where that refuses to mix dtypes."""
    (notes, scales), (expected, own) = found("global", half)[name], found("plain", half)[name]
    losses, dtypes = split(notes)
    assert f"torch.{half}" in dtypes or name in ("lora_by_hand", "apex_O0")
    if isinstance(expected, str):
        assert "must have the same dtype" in expected
        assert losses[-1] < losses[0]
    else:
        assert losses == pytest.approx(split(expected)[0], rel=0.02)
        assert scales == own


def split(notes: Any) -> tuple[list[float], list[str]]:
    """Return the losses, and the dtypes."""
    assert not isinstance(notes, str), notes
    losses = [note for note in notes if not isinstance(note, str)]
    dtypes = [note if isinstance(note, str) else note[0] for note in notes]
    return [loss for _, loss in losses], dtypes
