"""Recording changes no result, samples the steps that it says, and ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp.runtime import runtime_of
from autoamp.torch_private import dispatch_modes
from tests.diagnostics.report.runs import train


def test_weights_are_bitwise_those_without() -> None:
    handle, recorded = train(14, faults=(4,))
    handle.deactivate()
    _, without = train(14, faults=(4,), record=False)
    assert all(torch.equal(one, other) for one, other in zip(recorded, without, strict=True))


def test_steps_skips_and_samples() -> None:
    handle, _ = train(14, faults=(4, 9))
    recording = handle.record()
    assert recording.steps == 14
    assert [step for step, _, _ in recording.skips] == [4, 9]
    assert [found.kind for _, _, found in recording.skips] == ["half_precision_op"] * 2
    assert looked_at(recording) == [(0, "casts"), (2, "values"), (10, "casts"), (12, "values")]
    linear = [row for row in recording.samples.rows.values() if row.op.endswith("linear")]
    # Three layers, in two steps that were traced, the first of all included.
    assert sorted(row.calls for row in linear) == [2, 2, 2]
    assert {"0.weight", "2.project.bias"} <= recording.samples.gradients.keys()


def looked_at(recording: Any) -> list[tuple[int, str]]:
    assert all(sample.whole for sample in recording.samples.steps)
    return [(sample.step, sample.kind) for sample in recording.samples.steps]


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
    # Steps 0 and 10 were traced, steps 1 and 11 timed.
    assert (row["calls"], row["timed_calls"]) == (2, 2)
    assert row["cpu_us"] > 0.0


def test_a_sample_has_an_end_and_the_report_tells_its_cost() -> None:
    found = evaluated(6_000, no_grad=False)
    assert 0 < sum(row["calls"] for row in found["trace"]["rows"]) < 6_000
    cut = [sample["step"] for sample in found["samples"]["steps"] if not sample["whole"]]
    assert {1, 2} <= set(cut) or found["samples"]["left_out"]
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
    handle.record().stop()
    assert not runtime_of(handle).recording.active
    counted = runtime_of(handle).recording.steps
    handle.deactivate()
    assert counted == 8


def test_optimizers_that_nobody_guards_are_seen() -> None:
    handle: object = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = handle.record(times=False)  # type: ignore[attr-defined]
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).float().sum().backward()
        optimizer.step()
    recording.stop()
    assert recording.steps == 4
    assert looked_at(recording) == [(0, "casts"), (2, "values")]


def test_a_mode_of_the_program_ends_as_it_would() -> None:
    handle: object = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = handle.record(times=False)  # type: ignore[attr-defined]
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
def test_a_fork_looks_on_no_more() -> None:
    handle: object = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    recording = handle.record(times=False)  # type: ignore[attr-defined]
    model(torch.ones(2, 4))
    assert dispatch_modes() == 1
    child = os.fork()
    if not child:
        os._exit(dispatch_modes() + 2 * recording.active)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recording.stop()
    assert dispatch_modes() == 0
