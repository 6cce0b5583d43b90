"""Whole runs, each once and checked; timed with ``pytest tests/benchmarks --benchmark-enable``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import autoamp
from tests.benchmarks import diagnostics, framework, memory
from tests.benchmarks.workers import WAYS

RUNS = framework.runs(False, "cpu", torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in RUNS if "512" not in name])
def test_run(benchmark: Any, name: str, way: str) -> None:
    benchmark.group = name
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16) if way == "autoamp" else None
    result = benchmark(RUNS[name].workload(way, torch.bfloat16, "cpu", handle))
    if RUNS[name].kind != "train":
        assert result.dtype is (torch.float32 if way == "plain" else torch.bfloat16)
        assert result.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_check_of_a_step(benchmark: Any, way: str) -> None:
    benchmark.group = framework.CHECK
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=128.0) if way == "autoamp" else None
    benchmark(framework._check(way, "cpu", handle))
    if handle is not None:
        assert handle.skipped_steps == 0
        assert not handle.last_step_skipped


def test_shared_casts_save_memory_for_backward() -> None:
    found = memory.compare()
    assert found["transformer"]["autoamp"] < found["transformer"]["autocast"]
    assert found["ResNet-18"]["autoamp"] <= found["ResNet-18"]["autocast"]


def test_runs_on_a_cpu_leave_out_what_it_has_no_kernel_for() -> None:
    kinds = {run.kind for run in RUNS.values()}
    assert kinds == {"train", "no_grad", "inference"}
    assert any("LSTM" in name for name in RUNS)
    assert not any("LSTM" in name for name in framework.runs(True, "cpu", torch.float16))
    assert len(set(itertools.chain(RUNS))) == 11


def test_each_tool_looks_on_at_a_step() -> None:
    found = diagnostics.measure("float16", rounds=1, widths=(8,))
    assert set(found) == {*diagnostics.TORCHS, diagnostics.STEP, *diagnostics.OURS}
    assert all(ratios[8][0] > 0 for ratios in found.values())
    assert autoamp.current_handle() is None
