"""Recording changes no result, samples the steps that it says, and ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp.diagnostics.report.sampling import plan
from autoamp.torch_private import dispatch_modes
from tests.diagnostics.report.runs import train


def test_weights_are_bitwise_those_without() -> None:
    handle, recorded = train(14, faults=(4,))
    handle.deactivate()
    _, without = train(14, faults=(4,), record=False)
    assert all(torch.equal(one, other) for one, other in zip(recorded, without, strict=True))


def test_plan_is_early_and_then_rare() -> None:
    looked_at = [step for step in range(3500) if plan(step)]
    assert looked_at == [0, 1, 10, 11, 100, 101, 1000, 1001, 2000, 2001, 3000, 3001]
    assert [plan(step) for step in (0, 1, 2, 10, 11, 2001)] == ["casts", "values", None, "casts", "values", "values"]


def test_steps_skips_and_samples() -> None:
    handle, _ = train(14, faults=(4, 9))
    recording = handle.record()
    assert recording.steps == 14
    assert [(step, found.kind) for step, _, found in recording.skips] == [
        (4, "half_precision_op"), (9, "half_precision_op"),
    ]  # fmt: skip
    found = handle.report()
    assert looked_at(found) == [(0, "casts"), (1, "values"), (10, "casts"), (11, "values")]
    linear = [row for row in found["trace"]["rows"] if row["op"].endswith("linear")]
    # Three layers, in two steps. Input, weight and bias are cast; the input of the last is half already.
    assert sorted((row["calls"], row["casts"] + row["spared"]) for row in linear) == [(2, 4), (2, 6), (2, 6)]
    assert [row["dtypes_out"] for row in linear] == [{"float16": 2}] * 3
    assert {"0.weight", "2.project.bias"} <= {row["parameter"] for row in found["values"]["gradients"]}


def looked_at(document: dict[str, Any]) -> list[tuple[int, str]]:
    assert all(sample["whole"] for sample in document["samples"]["steps"])
    return [(sample["step"], sample["kind"]) for sample in document["samples"]["steps"]]


def evaluated(calls: int, *, no_grad: bool) -> dict[str, Any]:
    """Train for 12 steps, with an evaluation of so many calls after each, and return the report."""
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.record()
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.set_grad_enabled(not no_grad):
            for _ in range(calls):
                model(torch.ones(2, 4))
    found: dict[str, Any] = handle.report()
    return found


def test_an_evaluation_between_steps_is_no_part_of_a_step() -> None:
    found = evaluated(50, no_grad=True)
    (row,) = [row for row in found["trace"]["rows"] if row["op"].endswith("linear")]
    # Steps 0 and 10 were traced.
    assert row["calls"] == 2


def test_a_sample_has_an_end_and_the_report_tells_its_cost() -> None:
    found = evaluated(6_000, no_grad=False)
    assert 0 < sum(row["calls"] for row in found["trace"]["rows"]) < 6_000
    cut = [sample["step"] for sample in found["samples"]["steps"] if not sample["whole"]]
    assert 1 in cut or found["samples"]["left_out"]
    told = [line["what"] for line in found["coverage"]]
    assert "samples not to the end of the step" in told
    assert 0.0 < found["samples"]["sampled_seconds"] < found["samples"]["seconds"]


def test_the_report_tells_of_steps_that_were_compared_with_fp32() -> None:
    handle, _ = train(6)
    found = handle.report()["samples"]
    # Steps 0, 1 and 4.
    assert found["compared"] == 3
    assert 0.0 < found["compared_seconds"] < found["seconds"]


def test_nothing_observes_between_samples_and_after() -> None:
    handle, _ = train(8)
    assert dispatch_modes() == 0
    recording = handle.record()
    recording.stop()
    assert (recording.active, recording.steps) == (False, 8)


def test_optimizers_that_nobody_guards_are_seen() -> None:
    found = evaluated(0, no_grad=True)
    assert found["timeline"]["steps"] == 12
    assert looked_at(found)[:3] == [(0, "casts"), (1, "values"), (10, "casts")]


def test_a_mode_of_the_program_ends_as_it_would() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = handle.record()
    for _ in range(4):
        # It begins outside of our sample or within it, and ends after the step.
        with FlopCounterMode(display=False) as flops:
            model(torch.ones(2, 4)).float().sum().backward()
            optimizer.step()
        assert flops.get_total_flops() > 0
        assert dispatch_modes() == 0 or recording.active
    recording.stop()
    assert dispatch_modes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_is_not_looked_at() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    handle.record()
    model(torch.ones(2, 4))
    assert dispatch_modes() == 1
    child = os.fork()
    if not child:
        os._exit(dispatch_modes())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # What it had seen by then is kept.
    (row,) = handle.report()["trace"]["rows"]
    assert row["calls"] == 1
