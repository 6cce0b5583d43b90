"""The cost of a call that is patched, of one that is not, of `init()` and of a training step.

By default each runs once, and what it returns is checked. To time: ``pytest tests/benchmarks --benchmark-enable``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import autoamp
from tests.benchmarks.cases import CASES, DEVICE, Case, TrainingStep, autocast, in_scope, patched

pytestmark = pytest.mark.benchmark(warmup=True, min_rounds=20)

HALF = torch.float16


def wanted_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.name.startswith(("softmax", "prod", "mse_loss")) else HALF


@pytest.mark.parametrize("way", ["plain", "autocast", "autoamp"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_call(benchmark: Any, case: Case, way: str) -> None:
    benchmark.group = case.name
    workload = case.make(HALF)
    way_in: Any = {"plain": contextlib.nullcontext(), "autocast": autocast(HALF), "autoamp": patched(HALF)}[way]
    if way == "autocast" and case.scoped:
        way_in, workload = contextlib.nullcontext(), in_scope(workload, HALF)
    with way_in:
        result = benchmark(workload)
    if way == "autoamp":
        assert result.dtype is wanted_dtype(case)


def test_an_unlisted_op_is_the_very_same_object() -> None:
    names = ["relu", "add", "mul", "sigmoid", "tanh", "clamp", "reshape"]
    originals = [getattr(owner, name) for owner in (torch, torch.Tensor) for name in names]
    with patched(HALF):
        now = [getattr(owner, name) for owner in (torch, torch.Tensor) for name in names]
        assert all(one is other for one, other in zip(now, originals, strict=True))


@pytest.mark.parametrize("rebind", [True, False])
def test_init(benchmark: Any, rebind: bool) -> None:
    handles: list[Any] = []

    def setup() -> None:
        while handles:
            handles.pop().deactivate()

    def init() -> None:
        handles.append(autoamp.init(device_type=DEVICE, dtype=HALF, rebind=rebind))

    benchmark.pedantic(init, setup=setup, rounds=20)
    assert handles[-1].is_active()


def test_deactivate(benchmark: Any) -> None:
    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        return (autoamp.init(device_type=DEVICE, dtype=HALF),), {}

    assert benchmark.pedantic(lambda handle: handle.deactivate(), setup=setup, rounds=20) == ()


@pytest.mark.parametrize("way", ["plain", "autocast", "autoamp"])
def test_training_step(benchmark: Any, way: str) -> None:
    benchmark.group = "training step of a small classifier"
    step = TrainingStep()
    before = step.loss().item()
    if way == "autoamp":
        with patched(HALF) as handle:
            handle = autoamp.init(device_type=DEVICE, dtype=HALF, rebind=False, loss_scale=128.0)
            benchmark(step.with_handle(handle))
            assert handle.skipped_steps == 0
    else:
        benchmark(step.plain() if way == "plain" else step.with_autocast(HALF))
    assert step.loss().item() < before
