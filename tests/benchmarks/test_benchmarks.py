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


@pytest.mark.parametrize(("kind", "way"), [("training", "autoamp run, O2"), ("evaluation", "autoamp run, inference()")])
def test_a_way_is_measured_beside_autocast(kind: str, way: str) -> None:
    found = measured(HOST, kind, ["autocast", way], 2, 0.01)
    theirs, ours = found["autocast"], found[way]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    assert ours.get("bytes", 0) <= theirs.get("bytes", 0)
    cells = row(HOST, kind, way, [found]).split(" | ")
    assert cells[1:3] == [kind, way]
    assert len(cells) == 10


def test_a_way_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS["training"], "fp32", ((), ("--no-such-option",)))
    found = measured(HOST, "training", ["fp32"], 1, 0.01)
    assert "unrecognized arguments: --no-such-option" in row(HOST, "training", "fp32", [found])
