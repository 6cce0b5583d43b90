"""The report of a run: its lines for people."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

from autoamp.cli.report import Report

REPORT: dict[str, Any] = {
    "program": ["train.py"], "opt_level": "O1", "device_type": "cuda", "dtype": "float16",
    "ops": {"float16": 12345, "float32": 6}, "casts": {"float16": 78}, "loss_scale": 65536.0, "steps": 400,
    "skipped": 2, "seconds": 12.34, "exit_code": 0, "by_program": False, "nonfinite": 0, "scaling_left_to": None,
    "unused_scaler": False, "casts_left_to": None, "unmatched": {}, "own_dtypes": {}, "parameters": None,
    "masters": False, "lists": [], "folder": "/here", "half_losses": [], "repeated": [], "memory": None,
    "lost_params": 0, "half_params": 0, "peak_rss": None, "rank": None, "ranks": None, "no_ops": None,
    "turned_off": False,
}  # fmt: skip
HALVES = {"by_program": True, "ops": {}, "casts": {}, "parameters": {"float16": 1072, "float32": 16}}
OURS = "ops 12,345 float16, 6 float32; casts 78 to float16; "
STEPS = "loss scale 65536; 2 of 400 steps skipped; "
BY_PROGRAM = {
    "casts_left_to": "torch.autocast", "loss_scale": None, "scaling_left_to": "torch.amp.GradScaler",
    "own_dtypes": {"float16": 400, "bfloat16": 3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look as if it had started no other, whatever ran in it before."""
    for name in [name for name in sys.modules if name.startswith("multiprocessing.popen_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        ({}, f"float16 on cuda (O1); {OURS}{STEPS}"),
        ({"ops": {}, "casts": {}}, f"float16 on cuda (O1); ops 0; casts 0; {STEPS}"),
        (
            {"ops": {}, "casts": {}, "no_ops": "no module was called before the step at /here/train.py:3"},
            f"float16 on cuda (O1); ops 0 (no module was called before the step at train.py:3); casts 0; {STEPS}",
        ),
        (
            {"loss_scale": None, "scaling_left_to": "torch.autocast"},
            f"float16 on cuda (O1); {OURS}loss scaling left to the program's torch.autocast; 400 steps; ",
        ),
        (
            {"unused_scaler": True},
            f"float16 on cuda (O1); {OURS}the program's torch.amp.GradScaler scaled no loss; {STEPS}",
        ),
        (
            BY_PROGRAM,
            "float16 and bfloat16 on cuda by the program's own torch.autocast; loss scaling left to the program's "
            "torch.amp.GradScaler; 400 steps; ",
        ),
        ({"rank": 0, "ranks": 4}, f"float16 on cuda (O1); rank 0 of 4 alone; {OURS}{STEPS}"),
        ({"rank": 0, "ranks": 1}, f"float16 on cuda (O1); {OURS}{STEPS}"),
        (
            {"lists": ["lists/default.toml", "/else/autoamp.toml"]},
            f"float16 on cuda (O1); {OURS}{STEPS}lists default.toml, /else/autoamp.toml; ",
        ),
        (
            {**HALVES, "opt_level": "O3"},
            f"float16 on cuda (O3, set up by the program); parameters 1,072 float16, 16 float32, without masters; "
            f"{STEPS}",
        ),
        (
            {**HALVES, "dtype": "float32", "opt_level": "O0", "parameters": {"float32": 1088}},
            f"float32 on cuda (O0, set up by the program); {STEPS}",
        ),
        (
            {"turned_off": True, "ops": {}, "casts": {}, "loss_scale": None, "steps": 0},
            "float16 on cuda (O1, turned off by the program); ops 0; casts 0; ",
        ),
        (
            {
                "turned_off": True,
                "ops": {},
                "casts": {},
                "loss_scale": None,
                "steps": 0,
                "unmatched": {"encoder.*": "'encoder.*' matches none"},
            },
            "float16 on cuda (O1, turned off by the program); ops 0; casts 0; ",
        ),
        (
            {"turned_off": True, "dtype": None, "ops": {}, "casts": {}, "opt_level": "O2"},
            "no casts (O2): turned off by the program; ",
        ),
        # One that failed may have had no time to call anything.
        ({"dtype": None, "ops": {}, "casts": {}, "opt_level": "O3", "exit_code": 1}, "no casts (O3); "),
    ],
)
def test_summary_says_what_was_cast_and_scaled(changes: dict[str, Any], summary: str) -> None:
    assert Report(**{**REPORT, **changes}).summary() == [f"{summary}12.3 s"]


@pytest.mark.parametrize("has_children", [False, True])
def test_rules_without_effect_are_told_but_by_a_process_that_only_waits(
    monkeypatch: pytest.MonkeyPatch, has_children: bool
) -> None:
    if has_children:
        # As Python imports it at the start of the first process.
        monkeypatch.setitem(sys.modules, "multiprocessing.popen_fork", multiprocessing)
    idle = {
        "ops": {},
        "casts": {},
        "steps": 0,
        "loss_scale": None,
        "unmatched": {"encoder.*": "'encoder.*' matches none"},
    }
    lines = Report(**{**REPORT, **idle}).summary()
    assert ("no effect: 'encoder.*' matches none" in lines) is not has_children
    assert ("no optimizer was seen" in lines[0]) is not has_children
    assert ("the processes that it started are not counted" in lines[0]) is has_children
