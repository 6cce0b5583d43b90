"""The report of a run: its line for people, and its JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoamp.cli.report import Report

REPORT = Report(
    program=["train.py"], opt_level="O1", device_type="cuda", dtype="float16", ops={"float16": 12345, "float32": 6},
    casts={"float16": 78}, functions={"torch.mm": {"float16": 12345, "float32": 6}}, loss_scale=65536.0, steps=400,
    skipped=2, seconds=12.34, exit_code=0,
    by_program=False, peak_rss=None,
)  # fmt: skip


def test_summary_is_one_line() -> None:
    assert REPORT.summary() == (
        "autoamp: float16 on cuda (O1); ops 12,345 float16, 6 float32; casts 78 to float16; loss scale 65536; "
        "2 of 400 steps skipped; 12.3 s"
    )


UNCOUNTED = {"ops": None, "casts": None}
NO_CASTS = {**UNCOUNTED, "dtype": None, "device_type": None}


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        (UNCOUNTED, "float16 on cuda (O1); loss scale 65536; 2 of 400 steps skipped;"),
        ({"ops": {}, "casts": {}}, "float16 on cuda (O1); ops 0; casts 0; loss scale 65536; 2 of 400 steps skipped;"),
        (
            {**UNCOUNTED, "loss_scale": None, "scaling_left_to": "torch.autocast"},
            "float16 on cuda (O1); loss scaling left to the program's torch.autocast; 400 steps;",
        ),
        (
            {**UNCOUNTED, "unused_scaler": True},
            "float16 on cuda (O1); the program's torch.amp.GradScaler scaled no loss; loss scale 65536; "
            "2 of 400 steps skipped;",
        ),
        (
            {
                "casts_left_to": "torch.autocast", "loss_scale": None, "scaling_left_to": "torch.amp.GradScaler",
                "own_dtypes": {"float16": 400, "bfloat16": 3},
            },
            "float16 and bfloat16 on cuda by the program's own torch.autocast; loss scaling left to the program's "
            "torch.amp.GradScaler; 400 steps;",
        ),
        (
            {**UNCOUNTED, "rank": 0, "ranks": 4},
            "float16 on cuda (O1); rank 0 of 4 alone; loss scale 65536; 2 of 400 steps skipped;",
        ),
        ({**UNCOUNTED, "rank": 0, "ranks": 1}, "float16 on cuda (O1); loss scale 65536; 2 of 400 steps skipped;"),
        (
            {**UNCOUNTED, "steps": 1, "skipped": 0, "lists": ("lists/default.toml", "/else/autoamp.toml")},
            "float16 on cuda (O1); loss scale 65536; 0 of 1 steps skipped; lists default.toml, /else/autoamp.toml;",
        ),
        # One that failed may have had no time to call anything.
        ({**NO_CASTS, "opt_level": "O3", "exit_code": 1}, "no casts (O3);"),
    ],
)  # fmt: skip
def test_summary_says_what_was_cast_and_scaled(changes: dict[str, Any], summary: str) -> None:
    assert replace(REPORT, **changes).summary() == f"autoamp: {summary} 12.3 s"


def test_summary_tells_of_parameters_in_half_precision() -> None:
    level = replace(REPORT, opt_level="O2", by_program=True, ops={}, casts={}, masters=True,
                    parameters={"float16": 1072, "float32": 16})  # fmt: skip
    assert level.summary() == (
        "autoamp: float16 on cuda (O2, set up by the program); parameters 1,072 float16, 16 float32, with fp32 "
        "masters; loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )
    assert "float16, 16 float32, without masters;" in replace(level, opt_level="O3", masters=False).summary()
    assert "parameters" not in replace(level, dtype="float32", opt_level="O0", parameters={"float32": 1088}).summary()


def test_summary_adds_up_child_processes() -> None:
    parent = replace(REPORT, ops={}, casts={}, functions={}, loss_scale=None, steps=0, skipped=0)
    idle = replace(parent, exit_code=1)
    assert parent.with_children([]) == parent
    assert parent.with_children([idle]) == parent
    both = parent.with_children([REPORT, idle, replace(REPORT, loss_scale=8.0, ops={"float32": 2}, steps=1)])
    assert (both.ops, both.casts) == ({"float16": 12345, "float32": 8}, {"float16": 156})
    assert both.functions == {"torch.mm": {"float16": 24690, "float32": 12}}
    assert (both.steps, both.skipped, both.children, both.loss_scale) == (401, 4, 2, 65536.0)
    assert "(O1); 2 child processes included; ops 12,345 float16, 8 float32;" in both.summary()
    evaluation = replace(idle, own_dtypes={"float16": 3}, exit_code=2)
    assert not evaluation.is_idle
    assert parent.with_children([evaluation]).own_dtypes == {"float16": 3}
    own = REPORT.with_children([replace(REPORT, dtype="bfloat16")])
    assert (own.dtype, own.children, own.steps) == ("float16", 1, 800)
    assert "1 child process included;" in own.summary()
