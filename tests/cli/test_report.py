"""The report of a run: its line for people, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from autoamp.cli.report import Report

REPORT = Report(
    program=["train.py"], opt_level="O1", device_type="cuda", dtype="float16", ops={"float16": 12345, "float32": 6},
    casts={"float16": 78}, functions={"torch.mm": {"float16": 12345, "float32": 6}}, loss_scale=65536.0, steps=400,
    skipped=2, seconds=12.34, exit_code=0,
    by_program=False,
)  # fmt: skip


def test_summary_is_one_line() -> None:
    assert REPORT.summary() == (
        "autoamp: float16 on cuda (O1); ops 12,345 float16, 6 float32; casts 78 to float16; loss scale 65536; "
        "2 of 400 steps skipped; 12.3 s"
    )


def test_summary_leaves_out_what_was_not_counted() -> None:
    assert replace(REPORT, ops=None, casts=None).summary() == (
        "autoamp: float16 on cuda (O1); loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )
    assert "; ops 0; casts 0;" in replace(REPORT, ops={}, casts={}).summary()


def test_summary_says_who_scales() -> None:
    said = replace(REPORT, ops=None, casts=None, loss_scale=None, scaling_left_to="torch.autocast").summary()
    assert said == "autoamp: float16 on cuda (O1); loss scaling left to the program's torch.autocast; 12.3 s"


def test_summary_says_that_nothing_is_scaled() -> None:
    said = replace(REPORT, ops=None, casts=None, loss_scale=None).summary()
    assert said == "autoamp: float16 on cuda (O1); losses are not scaled, as no optimizer was seen; 12.3 s"


def test_summary_tells_of_the_programs_own_half_precision() -> None:
    own = replace(REPORT, ops=None, casts=None, scaling_left_to="FP16_Optimizer", casts_left_to="FP16_Optimizer")
    assert own.summary() == (
        "autoamp: casts left to the program, which has FP16_Optimizer; loss scaling left to the program's "
        "FP16_Optimizer: loss scale 65536; 2 of 400 steps skipped; 12.3 s"
    )


def test_summary_tells_of_a_call_that_never_came() -> None:
    said = replace(REPORT, waited_for="amp.initialize").summary()
    assert said == (
        "autoamp: no casts (O1): the program's source calls amp.initialize(), which was not called, and no optimizer "
        "stepped; 12.3 s"
    )


def test_summary_without_casts() -> None:
    none = replace(REPORT, dtype=None, device_type=None, opt_level="O0", ops=None, casts=None)
    assert none.summary() == "autoamp: no casts (O0); 12.3 s"
    assert "use O1" in replace(none, opt_level="O3").summary()
    # One that failed may have had no time to call anything.
    assert "use O1" not in replace(none, opt_level="O3", exit_code=1).summary()


def test_report_is_plain_values() -> None:
    report = json.loads(json.dumps(REPORT.as_dict()))
    assert report["ops"] == {"float16": 12345, "float32": 6}
    assert report["versions"]["torch"] == torch.__version__
