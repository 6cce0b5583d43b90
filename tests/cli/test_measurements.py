"""How fast half precision is: rounds in pairs, of true dtypes, and the verdict on them."""

from __future__ import annotations

import pytest
import torch

import autoamp
from autoamp.cli import measurements
from autoamp.cli.measurements import Measured, Spread


def measured(matmul: float, elementwise: float) -> Measured:
    """A measurement with these ratios."""
    one = Spread(1.0, 1.0, 1.0)
    spreads = (Spread(ratio, ratio, ratio) for ratio in (matmul, elementwise))
    return Measured("fp16", one, one, *spreads, size=1, elements=1)


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        (8.0, 1.9, "fp16 pays here: matmul 8.0 times"),
        (1.0, 1.9, "memory-bound models only"),
        (1.0, 1.0, "saves memory, not time"),
        (0.3, 1.9, "does not pay here: matmul 0.3 times"),
        (0.0148, 1.9, "does not pay here: matmul 0.015 times"),
    ],
)
def test_verdict_says_whether_half_precision_pays(matmul: float, elementwise: float, said: str) -> None:
    assert said in measured(matmul, elementwise).verdict


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        (Spread(1.5, 0.8, 1.9), Spread(1.0, 1.0, 1.0), "fp16: too noisy to tell: matmul 0.8 to 1.9, memory-bound ops"),
        (Spread(1.0, 1.0, 1.0), Spread(1.5, 0.9, 1.8), "fp16: too noisy to tell"),
        # As noisy, but each repeat says the same.
        (Spread(3.0, 2.0, 5.0), Spread(1.0, 1.0, 1.0), "fp16 pays here: matmul 3.0 times"),
        (Spread(0.2, 0.1, 0.4), Spread(1.0, 1.0, 1.0), "fp16 does not pay here: matmul 0.2 times"),
        # Both sides of a limit, close together.
        (Spread(1.2, 1.15, 1.25), Spread(1.0, 1.0, 1.0), "fp16 pays here: matmul 1.2 times"),
    ],
)
def test_verdict_says_where_repeats_differ(matmul: Spread, elementwise: Spread, said: str) -> None:
    one = Spread(1.0, 1.0, 1.0)
    assert Measured("fp16", one, one, matmul, elementwise, size=1, elements=1).verdict.startswith(said)


def test_spread_is_median_lowest_and_highest() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 1.0, 5.0)


def test_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each repeat has rounds of its own, and half gets faster from one to the next.
    speeds = iter([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0])

    def rounds(*_: object) -> dict[str, list[float]]:
        speed = next(speeds)
        return {"fp32": [6.0, 6.0, 60.0], "fp16": [6.0 / speed, 6.0 / speed, 1.0], "bf16": [6.0, 6.0, 6.0]}

    monkeypatch.setattr(measurements, "_rounds", rounds)
    monkeypatch.setattr(measurements, "_matmuls", lambda kind: (10, {}))
    monkeypatch.setattr(measurements, "_copies", lambda kind, elements: {})
    _, fp16, bf16 = measurements.measure("cpu")
    assert fp16.matmul == fp16.elementwise == Spread(3.0, 1.0, 5.0)
    assert bf16.matmul == Spread(1.0, 1.0, 1.0)
    assert next(speeds, None) is None


def test_measurement_pairs_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half is twice as fast in every round, though rounds differ.
    rounds = {"fp32": [2.0, 4.0, 6.0], "fp16": [1.0, 2.0, 3.0], "bf16": [1.0, 2.0, 3.0]}
    monkeypatch.setattr(measurements, "_rounds", lambda *_: rounds)
    monkeypatch.setattr(measurements, "_matmuls", lambda kind: (10, {}))
    monkeypatch.setattr(measurements, "_copies", lambda kind, elements: {})
    fp32, fp16, _ = measurements.measure("cpu")
    assert fp16.matmul == Spread(2.0, 2.0, 2.0)
    assert fp32.flops.median == pytest.approx(2 * 10**3 / 4)
    # As many elements, of half the bytes, in half the time.
    assert fp16.bytes.median == pytest.approx(fp32.bytes.median)


def test_measurement_runs_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    matmul = measurements._matmul
    monkeypatch.setattr(
        measurements, "_matmul", lambda kind, size, dtype: sizes.append(size) or matmul(kind, 16, dtype)
    )
    monkeypatch.setattr(measurements, "_time", lambda call, kind: call() is None or 1.0)
    found = measurements.measure("cpu", seconds=0.0)
    assert [one.dtype for one in found] == ["fp32", "fp16", "bf16"]
    assert all(one.flops.median > 0 and one.bytes.median > 0 for one in found)
    assert set(sizes) == {256}


def test_measurement_is_of_true_dtypes_under_an_active_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_rounds", lambda calls, *_: {name: [1.0, 1.0] for name in calls})
    seen = []
    monkeypatch.setattr(measurements, "_time", lambda call, kind: seen.append(call().dtype) or 1.0)
    autoamp.init(device_type="cpu", dtype=torch.float16)
    measurements.measure("cpu")
    assert set(seen) == {torch.float32, torch.float16, torch.bfloat16}
