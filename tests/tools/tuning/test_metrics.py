"""Metrics that programs print and report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import autoamp
from autoamp.tools.tuning import METRICS_VARIABLE, metric_of

NO_FILE = Path("no such file")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss: 0.5", 0.5),
        ("epoch 1 loss=1e-3, lr=2\nepoch 2 loss=.25, lr=1", 0.25),
        ("{'eval': 1, 'loss': -2.5}", -2.5),
        ("LOSS = 3", 3.0),
        ("loss: inf", math.inf),
        ("val_loss: 1.0 my.loss: 2", None),
        ("loss: 12abc", None),
        ("no number: loss", None),
        ("loss: 1.0\nloss: nan\n", math.nan),
    ],
)
def test_printed(text: str, value: float | None) -> None:
    assert metric_of("loss", NO_FILE, text) == pytest.approx(value, nan_ok=True)
    assert metric_of("top-1(%)", NO_FILE, f"top-1(%): 71.5\n{text}") == 71.5


def test_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics"
    autoamp.report_metric("loss", 3)
    assert metric_of("loss", path, "") is None
    monkeypatch.setenv(METRICS_VARIABLE, str(path))
    autoamp.report_metric("loss", 2.0)
    autoamp.report_metric("loss", torch.tensor(0.5))
    autoamp.report_metric("accuracy", np.float32(0.25))
    autoamp.report_metric("worst", math.inf)
    assert metric_of("loss", path, "") == 0.5
    assert metric_of("accuracy", path, "") == 0.25
    assert metric_of("worst", path, "") == math.inf
    assert metric_of("other", path, "") is None


@pytest.mark.parametrize("value", ["low", None, print, torch.ones(2)], ids=str)
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(autoamp.UsageError, match="give a number"):
        autoamp.report_metric("loss", value)
