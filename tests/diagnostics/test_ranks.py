"""What ranks tell one another of a skipped step. With really spawned ranks: tests/diagnostics/test_overflow.py."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoamp.diagnostics import ranks
from autoamp.diagnostics.ranks import Comparison, TracingRanks


def compared(store: dist.Store, own: int, tracing: TracingRanks | None = None) -> Comparison:
    store.set(f"step/began/{own}", "1")
    return Comparison(tracing or TracingRanks(), store, "step", own, [rank for rank in range(3) if rank != own])


def test_all_of_them_hear_what_each_found() -> None:
    store = dist.HashStore()
    several = [compared(store, own) for own in range(3)]
    for one, blames in zip(several, (False, True, None), strict=True):
        one.tell(blames)
    assert several[0].hear() == {1: True, 2: None}
    assert several[1].hear() == {0: False, 2: None}


BRIEF = datetime.timedelta(milliseconds=50)


def test_a_rank_that_does_not_come_is_waited_for_once() -> None:
    store, tracing = dist.HashStore(), TracingRanks(to_come=BRIEF)
    one, other = compared(store, 0, tracing), compared(store, 1)
    one.tell(False)
    other.tell(True)
    assert one.hear() is None
    assert tracing.alone
    assert tracing.begin(nn.Linear(1, 1)) is None


def test_a_rank_that_came_and_found_nothing_in_time_is_unknown() -> None:
    store = dist.HashStore()
    several = [compared(store, own, TracingRanks(to_find=BRIEF)) for own in range(3)]
    several[1].tell(True)
    assert several[0].hear() == {1: True, 2: None}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_keys_of_an_earlier_handle_are_not_read_again() -> None:
    keys = []
    for _ in range(2):
        tracing = TracingRanks()
        for _ in range(2):
            began = tracing.begin(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))
            assert began is not None
            keys.append(began.key)
    assert len(set(keys)) == 4


@pytest.mark.usefixtures("one_process")
def test_without_a_store_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a torch without `_get_default_store` does."""
    monkeypatch.setattr(ranks, "default_store", lambda: None)
    assert TracingRanks().begin(nn.Linear(1, 1)) is None
    assert torch.distributed.is_initialized()
