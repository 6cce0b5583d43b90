"""docs/diagnostics.md: what went wrong, and where."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.behaviour.training import OVERFLOW, Training, started


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * x


def overflows(handle: Any, steps: int = 1) -> None:
    """Step a model whose product of 300 and 300 overflows in fp16."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Cube())
    nn.init.constant_(model[0].weight, 75.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        with handle.scale_loss(model(torch.ones(2, 4)).float().sum() * 1e-6, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def test_with_trace_overflow_a_skip_is_explained_by_op_module_line_and_entry() -> None:
    handle = started(trace_overflow=True)
    overflows(handle)
    found = handle.last_overflow
    assert found is not None
    assert (found.kind, found.op, found.module) == ("half_precision_op", "mul", "1")
    assert str(found.location).startswith("tests/behaviour/test_diagnostics.py:")
    assert found.suggestion == (
        'add fp32 = ["__mul__", "__rmul__"] to the list file (tried); an entry \'mul\' does not cover the operator'
    )


def test_a_loss_that_is_nan_already_is_told_as_nan_before_backward() -> None:
    """As in a path-length penalty whose running mean became nan in an earlier step."""
    handle = started(trace_overflow=True)
    model, mean = nn.Linear(4, 4), torch.full((), float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with handle.scale_loss((model(torch.ones(2, 4)).float() - mean).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = handle.last_overflow
    assert found is not None
    assert found.cause.startswith(f"nan before backward: a tensor read at {found.location} held it already")
    assert str(found.location).startswith("tests/behaviour/test_diagnostics.py:")


def test_the_suggested_entry_avoids_the_overflow() -> None:
    handle = started(trace_overflow=True, lists={"fp32": ["__mul__", "__rmul__"]})
    overflows(handle)
    assert (handle.skipped_steps, handle.last_overflow) == (0, None)


def test_at_a_fixed_scale_skips_are_explained_without_being_asked() -> None:
    handle = started(loss_scale=8.0)
    overflows(handle, steps=2)
    assert handle.last_overflow is not None
    assert handle.last_overflow.op == "mul"


def test_fifty_skips_in_a_row_are_an_error_that_names_the_parameters() -> None:
    training = Training(started(loss_scale=8.0))
    with pytest.raises(autoamp.NonFiniteGradientsError, match=r"50 steps of SGD in a row .*weight"):
        collections.deque((training.step(OVERFLOW) for _ in range(50)), maxlen=0)


@pytest.mark.parametrize("action", ["warn", "skip", "raise"])
def test_on_nonfinite_says_what_becomes_of_a_step_that_no_scale_guards(action: Any) -> None:
    training = Training(autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite=action))
    if action == "raise":
        with pytest.raises(autoamp.NonFiniteGradientsError):
            training.step(float("nan"))
    else:
        with pytest.warns(UserWarning, match="inf or nan in the gradients"):
            training.step(float("nan"))
    assert (training.weight == 1.0) == (action != "warn")


def test_a_trace_has_the_dtypes_and_casts_of_each_call() -> None:
    handle, model = started(), nn.Linear(4, 4)
    with handle.trace() as trace:
        model(torch.rand(2, 4))
    (row,) = [row for row in trace.to_dict()["rows"] if row["op"].endswith("linear")]
    assert row["calls"] == 1
    assert "float16" in str(row)


def test_profile_ranges_counts_what_fp16_cannot_hold() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with handle.profile_ranges() as ranges:
        torch.full((3,), 300.0) * torch.full((3,), 300.0)
    assert "mul" in str(ranges)


def test_a_report_is_json_or_a_page_by_the_name_of_its_file(tmp_path: Path) -> None:
    handle = started()
    handle.record()
    overflows(handle)
    handle.report(tmp_path / "run.json")
    handle.report(tmp_path / "run.html")
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 4
    assert "<html" in (tmp_path / "run.html").read_text()
