"""The steps of several ranks that are timed, once and checked, in a group of one process; ranks are started by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks import ranks


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ranks.WRAPPERS)
def test_both_ways_train_alike(benchmark: Any, wrapper: str) -> None:
    trained = {}
    for way in ranks.WAYS:
        training = ranks.Training.of(way, wrapper, width=16)
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        try:
            whole, part, scaling = training.times()
            assert 0.0 < scaling < part < whole
            assert training.collectives() == 0
            if way == "autoamp":
                benchmark(training.step)
                assert training.handle.skipped_steps == 0
        finally:
            if training.handle is not None:
                training.handle.deactivate()
        assert any(not torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))
        trained[way] = training
    assert trained["torch.amp"].scaler.get_scale() == ranks.SCALE


@pytest.mark.processes
@pytest.mark.parametrize(("wrapper", "collectives"), [("DistributedDataParallel", 0), ("fully_shard", 1)])
def test_ranks_answer(tmp_path: Path, wrapper: str, collectives: int) -> None:
    for way in ranks.WAYS:
        group = ranks.Ranks(way, wrapper, 2, tmp_path)
        whole, part, scaling = group.times()
        assert 0.0 < scaling < part < whole
        assert group.ask(ranks.COLLECTIVES) == [collectives] * 2
        group.close()
