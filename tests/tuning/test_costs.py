"""What the uses of an op cost together."""

from __future__ import annotations

from dataclasses import replace

from autoamp.tuning import Cost
from tests.tuning.planted import use


def test_totals() -> None:
    one = use("linear", "fp16", 3, 2, calls=4, kept=(5, 6))
    assert one.total("fp32") == Cost(4 * 3e-6, 20)
    assert one.total("unknown") is None
    assert replace(one, costs=None).total("fp32") is None
