"""Surveys as JSON."""

from __future__ import annotations

import math
from dataclasses import replace

from autoamp.tuning import Cost, Survey
from tests.tuning.planted import survey, use


def test_json_has_all_of_it() -> None:
    found = survey(
        use("linear", "fp16", 3, 2, calls=4, error=math.inf, kept=(5, 6)),
        replace(use("mul", "unlisted", 1, 1, error=None), costs=None),
        steps=3,
    )
    assert Survey.from_json(found.to_json()) == found


def test_totals() -> None:
    one = use("linear", "fp16", 3, 2, calls=4, kept=(5, 6))
    assert one.total("fp32") == Cost(4 * 3e-6, 20)
    assert one.total("unknown") is None
    assert replace(one, costs=None).total("fp32") is None
