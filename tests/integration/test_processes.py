"""Children of a patched process: forked ones cast as it does, spawned ones begin with plain torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import autoamp


class Items(Dataset[torch.Tensor]):
    """Each item is computed by a listed op, in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.ones(2, 2)
        return F.linear(x, x)


def dtype_of_linear() -> str:
    """What a listed op makes of fp32 in this process."""
    x = torch.ones(2, 2)
    return str(F.linear(x, x).dtype)


def in_child(method: str) -> str:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(dtype_of_linear)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_children_cast_and_spawned_ones_do_not() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    assert in_child("fork") == "torch.bfloat16"
    assert in_child("spawn") == "torch.float32"
    with handle.disable_casts():
        assert in_child("fork") == "torch.float32"
    handle.deactivate()
    assert in_child("fork") == "torch.float32"


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(("method", "dtype"), [("fork", torch.bfloat16), ("spawn", torch.float32)])
def test_workers_of_a_data_loader(method: str, dtype: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    loader = DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context=method)
    assert {batch.dtype for batch in loader} == {dtype}


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_that_is_forked_while_others_patch() -> None:
    stop, problems = threading.Event(), []

    def patches() -> None:
        while not stop.is_set():
            with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
                pass

    thread = threading.Thread(target=patches)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                # Whatever lock another thread held: the ops of a child go on.
                os._exit(0 if dtype_of_linear() in ("torch.float32", "torch.bfloat16") else 1)
            _, status = os.waitpid(child, 0)
            if status:
                problems.append(status)
    finally:
        stop.set()
        thread.join()
    assert not problems


def test_a_replacement_crosses_to_a_spawned_child_as_the_original() -> None:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    sent = F.softmax
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(sent, (torch.ones(2), 0))
    assert result.dtype is torch.float32
    assert pickle.loads(pickle.dumps(sent)) is F.softmax
