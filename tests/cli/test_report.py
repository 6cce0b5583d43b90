"""The report of a run: its line for people, and its JSON."""

from __future__ import annotations

from typing import Any

import pytest

from autoamp.cli.report import Report

REPORT = Report(
    program=["train.py"], opt_level="O1", device_type="cuda", dtype="float16", ops={"float16": 12345, "float32": 6},
    casts={"float16": 78}, functions={"torch.mm": {"float16": 12345, "float32": 6}}, loss_scale=65536.0, steps=400,
    skipped=2, seconds=12.34, exit_code=0, by_program=False, nonfinite=0, scaling_left_to=None, unused_scaler=False,
    casts_left_to=None, unmatched={}, own_dtypes={}, parameters=None, masters=False, lists=[], folder="/here",
    half_losses=[], lost_params=0, half_params=0, repeated=[], memory=None, peak_rss=None, rank=None, ranks=None,
)  # fmt: skip


def replace(report: Report, **changes: Any) -> Report:
    return Report(**{**vars(report), **changes})


def test_summary_is_one_line() -> None:
    assert REPORT.summary() == [
        "float16 on cuda (O1); ops 12,345 float16, 6 float32; casts 78 to float16; loss scale 65536; "
        "2 of 400 steps skipped; 12.3 s"
    ]


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
    assert replace(REPORT, **changes).summary() == [f"{summary} 12.3 s"]


def test_summary_tells_of_parameters_in_half_precision() -> None:
    level = replace(REPORT, opt_level="O2", by_program=True, ops={}, casts={}, masters=True,
                    parameters={"float16": 1072, "float32": 16})  # fmt: skip
    assert level.summary() == [
        "float16 on cuda (O2, set up by the program); parameters 1,072 float16, 16 float32, with fp32 masters; "
        "loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    ]
    assert "float16, 16 float32, without masters;" in replace(level, opt_level="O3", masters=False).summary()[0]
    in_fp32 = replace(level, dtype="float32", opt_level="O0", parameters={"float32": 1088})
    assert "parameters" not in in_fp32.summary()[0]
