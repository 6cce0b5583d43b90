"""Children of a patched process: forked ones cast as it does, spawned ones begin with plain torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

import autoamp


def dtype_of_linear() -> str:
    """What a listed op makes of fp32 in this process."""
    x = torch.ones(2, 2)
    return str(F.linear(x, x).dtype)


def in_forked_child() -> str:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(dtype_of_linear)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_children_cast_as_their_parent() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    assert in_forked_child() == "torch.bfloat16"
    with handle.disable_casts():
        assert in_forked_child() == "torch.float32"
    handle.deactivate()
    assert in_forked_child() == "torch.float32"


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


def test_a_spawned_child_begins_with_plain_torch_and_gets_originals_for_replacements() -> None:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    sent = F.softmax
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(dtype_of_linear) == "torch.float32"
        result = pool.apply(sent, (torch.ones(2), 0))
    assert result.dtype is torch.float32
    assert pickle.loads(pickle.dumps(sent)) is F.softmax
