"""Optimizers with losses of their own, in one thread and in several: what is wrong with one concerns no other."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.errors import NonFiniteGradientsError

HALF, BF16 = torch.float16, torch.bfloat16
WAYS = ["block", "auto_scale", "plain", "GradScaler"]


class Training:
    """A model and its optimizer; a loss of it is run backward in one of `WAYS`."""

    def __init__(self, handle: autoamp.Handle, way: str) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._handle, self._way = handle, way

    def backward(self, factor: float, scaler: Any) -> None:
        loss = self.model(torch.ones(2, 4)).float().mean() * factor
        if self._way == "block":
            with self._handle.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            (scaler.scale(loss) if self._way == "GradScaler" else loss).backward()

    def moves(self, scaler: Any) -> bool:
        before = self.model.weight.detach().clone()
        (scaler.step if self._way == "GradScaler" else type(self.optimizer).step)(self.optimizer)
        return not torch.equal(before, self.model.weight)


def begun(way: str, action: str, dtype: torch.dtype) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=dtype, scope="modules", on_nonfinite=action)
    if way == "auto_scale":
        handle.auto_scale()
    return handle


def in_order(good: Training, bad: Training, scaler: Any) -> bool:
    good.backward(1.0, scaler)
    bad.backward(math.inf, scaler)
    return good.moves(scaler)


def in_threads(good: Training, bad: Training, scaler: Any) -> bool:
    found: list[bool] = []
    turns = [threading.Event() for _ in range(3)]

    def trains_well() -> None:
        good.backward(1.0, scaler)
        turns[0].set()
        turns[1].wait(30.0)
        found.append(good.moves(scaler))
        turns[2].set()

    def trains_badly() -> None:
        turns[0].wait(30.0)
        bad.backward(math.inf, scaler)
        bad.optimizer.zero_grad()
        turns[1].set()
        turns[2].wait(30.0)

    threads = [threading.Thread(target=target) for target in (trains_well, trains_badly)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0]


@pytest.mark.parametrize("run", [in_order, in_threads])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("action", ["warn", "skip", "raise"])
@pytest.mark.parametrize("way", WAYS)
def test_the_inf_loss_of_another_optimizer_stops_no_step(
    way: str, action: str, dtype: torch.dtype, run: Callable[..., bool]
) -> None:
    handle, scaler = begun(way, action, dtype), torch.amp.GradScaler("cpu")
    try:
        good, bad = Training(handle, way), Training(handle, way)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(good, bad, scaler)
        assert not [one for one in caught if "has inf or nan" in str(one.message)]
    finally:
        handle.deactivate()


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_an_inf_loss_of_its_own_stops_a_step_whose_gradients_are_finite(action: str) -> None:
    handle = begun("plain", action, BF16)
    try:
        other, own = Training(handle, "plain"), Training(handle, "plain")
        other.backward(1.0, None)
        (own.model(torch.ones(2, 4)).float().mean() + math.inf).backward()
        if action == "raise":
            with pytest.raises(autoamp.NonFiniteGradientsError, match="inf or nan in the loss"):
                own.moves(None)
        else:
            with pytest.warns(UserWarning, match="inf or nan in the loss, and is skipped"):
                assert not own.moves(None)
    finally:
        handle.deactivate()


def test_skips_and_first_blocks_leave_what_other_threads_do_alone() -> None:
    """Who refers to a tuple that another thread builds makes that thread fail, and a list of all objects does."""
    errors: list[BaseException] = []
    is_over = threading.Event()

    def builds_tuples() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(300))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=builds_tuples)
    thread.start()
    try:
        for _ in range(8):
            handle = autoamp.init(device_type="cpu", dtype=HALF)
            one = Training(handle, "block")
            for factor in (math.inf, 1.0, math.inf):
                one.optimizer.zero_grad()
                one.backward(factor, None)
                one.optimizer.step()
            handle.deactivate()
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_a_loss_whose_pass_runs_on_a_worker_is_seen_by_the_step() -> None:
    handle = autoamp.init(device_type="cpu", dtype=BF16, on_nonfinite="raise")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = threading.Thread(target=lambda: (model(torch.ones(2, 4)).float().mean() + math.inf).backward())
    worker.start()
    worker.join()
    with pytest.raises(NonFiniteGradientsError, match="the loss"):
        optimizer.step()
    handle.deactivate()
