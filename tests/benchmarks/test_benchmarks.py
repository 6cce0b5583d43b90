"""The benchmarks run: each case's model on the device without values, and the smallest case in processes."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.__main__ import WAYS, measured, row
from tests.benchmarks.models import CASES

HOST = "host overhead: transformer 16, 2 x 4"


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_a_target_for_each_of_its_logits(name: str) -> None:
    with torch.device("meta"):
        model, x, y = CASES[name].make()
        assert model(x).flatten(0, -2).shape[0] == y.numel()


def test_ways_are_measured_beside_autocast_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS["training"], "fp32", ((), ("--no-such-option",)))
    way = "autoamp run, O2"
    found = measured(HOST, "training", ["autocast", way, "fp32"], 2, 0.01)
    theirs, ours = found["autocast"], found[way]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    assert ours["bytes"] <= theirs["bytes"]
    cells = row(HOST, "training", way, [found]).split(" | ")
    assert cells[1:3] == ["training", way]
    assert len(cells) == 10
    assert "unrecognized arguments: --no-such-option" in row(HOST, "training", "fp32", [found])
