"""The report of a run: its line for people, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from autoamp.cli.report import Report

REPORT = Report(
    program=["train.py"], opt_level="O1", device_type="cuda", dtype="float16", ops={"float16": 12345, "float32": 6},
    casts={"float16": 78}, functions={"torch.mm": {"float16": 12345, "float32": 6}}, loss_scale=65536.0, steps=400,
    skipped=2, seconds=12.34, exit_code=0,
    by_program=False,
)  # fmt: skip


def test_summary_is_short_lines() -> None:
    assert REPORT.summary() == (
        "autoamp: float16 on cuda (O1); ops 12,345 float16, 6 float32;\n"
        "  casts 78 to float16; loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )


@pytest.mark.parametrize("length", range(20, 200, 7))
def test_no_line_has_more_than_80_columns(length: int) -> None:
    words = "word " * (length // 5)
    lines = replace(REPORT, casts_left_to=f"{words}end").summary().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(line.strip() for line in lines).startswith(f"autoamp: casts left to the program, which has {words}")


def said(report: Report) -> str:
    """Return a summary in one line."""
    return " ".join(line.strip() for line in report.summary().splitlines())


def test_summary_leaves_out_what_was_not_counted() -> None:
    assert said(replace(REPORT, ops=None, casts=None)) == (
        "autoamp: float16 on cuda (O1); loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )
    assert "; ops 0; casts 0;" in said(replace(REPORT, ops={}, casts={}))


def test_summary_says_who_scales() -> None:
    found = said(replace(REPORT, ops=None, casts=None, loss_scale=None, scaling_left_to="torch.autocast"))
    assert found == (
        "autoamp: float16 on cuda (O1); loss scaling left to the program's torch.autocast; 400 steps; 12.3 s"
    )


def test_summary_says_that_nothing_is_scaled() -> None:
    found = said(replace(REPORT, ops=None, casts=None, loss_scale=None))
    assert found == "autoamp: float16 on cuda (O1); losses are not scaled, as no optimizer was seen; 12.3 s"


def test_summary_tells_of_the_programs_own_half_precision() -> None:
    own = replace(REPORT, ops={}, casts={}, scaling_left_to="FP16_Optimizer", casts_left_to="FP16_Optimizer")
    assert said(own) == (
        "autoamp: casts left to the program, which has FP16_Optimizer; loss scaling left to the program's "
        "FP16_Optimizer; loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )


def test_summary_names_the_dtype_of_the_programs_own_regions() -> None:
    own = replace(REPORT, dtype="float16", casts={}, casts_left_to="torch.autocast", loss_scale=None,
                  scaling_left_to="torch.amp.GradScaler", own_dtypes={"float16": 400, "bfloat16": 3})  # fmt: skip
    assert said(own) == (
        "autoamp: float16 and bfloat16 on cuda by the program's own torch.autocast; "
        "loss scaling left to the program's torch.amp.GradScaler; 400 steps; 12.3 s"
    )


def test_summary_tells_of_parameters_in_half_precision() -> None:
    level = replace(REPORT, opt_level="O2", by_program=True, ops={}, casts={}, masters=True,
                    parameters={"float16": 1072, "float32": 16})  # fmt: skip
    assert said(level) == (
        "autoamp: float16 on cuda (O2, set up by the program); parameters 1,072 float16, 16 float32, with fp32 "
        "masters; loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )
    assert "float16, 16 float32, without masters;" in said(replace(level, opt_level="O3", masters=False))
    assert "parameters" not in said(replace(level, dtype="float32", opt_level="O0", parameters={"float32": 1088}))


def test_summary_adds_up_child_processes() -> None:
    parent = replace(REPORT, ops={}, casts={}, functions={}, loss_scale=None, steps=0, skipped=0)
    idle = replace(parent, exit_code=1)
    assert parent.with_children([]) == parent
    assert parent.with_children([idle]) == parent
    both = parent.with_children([REPORT, idle, replace(REPORT, loss_scale=8.0, ops={"float32": 2}, steps=1)])
    assert (both.ops, both.casts) == ({"float16": 12345, "float32": 8}, {"float16": 156})
    assert both.functions == {"torch.mm": {"float16": 24690, "float32": 12}}
    assert (both.steps, both.skipped, both.children, both.loss_scale) == (401, 4, 2, 65536.0)
    assert "(O1); 2 child processes included; ops 12,345 float16, 8 float32;" in said(both)
    own = REPORT.with_children([replace(REPORT, dtype="bfloat16")])
    assert (own.dtype, own.children, own.steps) == ("float16", 1, 800)
    assert "1 child process included;" in said(own)


def test_summary_says_which_rank_it_is_of() -> None:
    assert "(O1); rank 0 of 4 alone;" in said(replace(REPORT, rank=0, ranks=4))
    assert "rank" not in said(replace(REPORT, rank=0, ranks=1))


def test_summary_without_casts() -> None:
    none = replace(REPORT, dtype=None, device_type=None, opt_level="O0", ops=None, casts=None)
    assert said(none) == "autoamp: no casts (O0); 12.3 s"
    assert "use O1" in said(replace(none, opt_level="O3"))
    # One that failed may have had no time to call anything.
    assert "use O1" not in said(replace(none, opt_level="O3", exit_code=1))


def test_report_is_plain_values() -> None:
    report = json.loads(json.dumps(REPORT.as_dict()))
    assert report["ops"] == {"float16": 12345, "float32": 6}
    assert report["versions"]["torch"] == torch.__version__
