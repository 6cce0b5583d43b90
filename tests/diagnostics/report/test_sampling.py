"""Which steps are looked at, and sums over samples."""

from __future__ import annotations

import torch
from torch import nn

import autoamp
from autoamp.diagnostics.report.sampling import Samples, plan


def test_plan_is_early_and_then_rare() -> None:
    looked_at = [step for step in range(3500) if plan(step)]
    assert looked_at == [0, 1, 2, 10, 11, 12, 100, 101, 102, 1000, 1001, 1002, 2000, 2001, 2002, 3000, 3001, 3002]
    assert [plan(step) for step in (0, 1, 2, 10, 11, 12, 2002, 2003)] == [
        "casts", "times", "values", "casts", "times", "values", "values", None,
    ]  # fmt: skip


def test_traces_add_up() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model, samples = nn.Sequential(nn.Linear(4, 4)), Samples()
    for _ in range(2):
        with handle.trace() as trace:  # type: ignore[attr-defined]
            model(torch.ones(2, 4))
        samples.add_trace(trace)
    (row,) = samples.rows.values()
    # Input, weight and bias in each of two calls.
    assert (row.calls, row.casts, row.bytes_cast) == (2, 6, 2 * 2 * (8 + 16 + 4))
    assert row.dtypes_out == {"bfloat16": 2}


def test_modules_are_noted_once() -> None:
    samples = Samples()
    for _ in range(2):
        samples.add_modules([nn.Sequential(nn.Linear(2, 3))])
    assert samples.modules["Sequential", "0"] == {
        "class": "Linear", "elements": 9, "dtypes": ["float32"], "scripted": False,
    }  # fmt: skip
