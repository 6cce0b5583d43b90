"""Recording changes no result, samples the steps that it says, and ends."""

from __future__ import annotations

import os

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
    assert recording.samples.steps == [(0, "casts"), (1, "casts"), (2, "values"), (10, "casts"), (11, "values")]
    linear = [row for row in recording.samples.rows.values() if row.op.endswith("linear")]
    # Three layers, in three steps that were traced, the first of all included.
    assert sorted(row.calls for row in linear) == [3, 3, 3]
    assert {"0.weight", "2.project.bias"} <= recording.samples.gradients.keys()


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
    assert recording.samples.steps == [(0, "casts"), (1, "casts"), (2, "values")]


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
