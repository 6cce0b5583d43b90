"""Overflows in programs of unusual forms. They are located, and the watch neither raises nor leaves anything behind."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autoamp.core import DynamicLossScaler
from autoamp.tools import HalfPrecisionOp, NotFiniteInFp32, ScaleSearch
from tests.tools.faults import (
    BIG_TIMES_BIG,
    Net,
    found_in,
    line_of,
    mean_square,
    modes,
    squared,
    started,
    take_step,
    train,
)


def inline_mse(out: Tensor) -> Tensor:
    """Call a loss module that nothing refers to after the call."""
    loss: Tensor = nn.MSELoss()(out.float(), torch.zeros(5, 4))
    return loss


class Marked(Tensor):
    """A subclass, as libraries have for images."""


# -- modules, losses and tensors --


def test_a_loss_module_made_for_one_call() -> None:
    factor = [1e-3]

    def data(x: Tensor, step: int) -> Tensor:
        # In the first step ops are watched, which would tell.
        factor[0] = 100.0 if step else 1e-3
        return x

    net = Net(lambda h: h.half().mul(factor[0]).float())
    found = found_in(train(net, scale=DynamicLossScaler(2.0**16), loss=inline_mse, data=data, steps=2))
    assert isinstance(found.verdict, ScaleSearch), str(found)
    assert found.iteration == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="DataParallel has devices")
def test_data_parallel_without_devices_is_as_what_it_wraps() -> None:
    found = found_in(train(nn.DataParallel(Net(squared))))
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)


@pytest.mark.parametrize("marked", ["input", "parameters"])
def test_a_model_of_tensors_of_a_subclass(marked: str) -> None:
    net = Net(squared)
    if marked == "parameters":
        for module in net.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().as_subclass(Marked)))
    found = found_in(train(net, data=lambda x, step: x.as_subclass(Marked) if marked == "input" else x))
    assert isinstance(found.verdict, HalfPrecisionOp), str(found)
    assert found.location == BIG_TIMES_BIG


# -- which steps are explained --


@pytest.mark.parametrize("step", [8, 9])
def test_the_first_skip_is_explained_and_one_after_those_that_are_recorded(step: int) -> None:
    number = [0]

    def data(x: Tensor, at: int) -> Tensor:
        number[0] = at
        return x

    net = Net(lambda h: squared(h) if number[0] in (0, step) else h)
    handle = train(net, data=data, steps=step + 1, traced=False)
    assert handle.skipped_steps == 2
    assert [found.iteration for found in handle.overflows] == [0, step]


def test_two_optimizers_that_step_by_the_same_calls_are_explained_at_their_second_skips() -> None:
    handle, net = started(traced=False), Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (net.first, net.last)]
    for step in range(4):
        net.faulty.fault = squared if step in (1, 2) else torch.relu
        with handle.scale_loss(mean_square(net(torch.randn(5, 4))), optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [found.location for found in handle.overflows] == [None] * 2 + [BIG_TIMES_BIG] * 2


# -- what stays --


def test_a_clean_step_keeps_neither_its_inputs_nor_its_model_alive() -> None:
    handle, net, data = started(), Net(), numpy.ones((5, 4), dtype=numpy.float32)
    references = weakref.ref(net), weakref.ref(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        take_step(handle, net, optimizer, x=torch.from_numpy(data))
    assert handle.skipped_steps == 0
    del net, data
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_recording_of_which_another_thread_steps() -> None:
    handle, net = started(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def update(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    with ThreadPoolExecutor(1) as worker:
        for _ in range(2):
            worker.submit(update, mean_square(net(torch.randn(5, 4)))).result()
            assert modes() == 2
    handle.deactivate()
    assert modes() == 0


def test_inf_that_the_program_writes_and_that_comes_to_the_loss() -> None:
    def loss(out: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask[0] = float("-inf")
        return (out.float() + mask).square().mean()

    found = found_in(train(Net(), loss=loss))
    assert isinstance(found.verdict, NotFiniteInFp32), str(found)
    assert found.location == line_of(loss, "mask[0]")


# -- errors in what looks on --


class Unrecordable(Tensor):
    """Raises where a record is to refer to it."""

    def detach(self) -> Any:
        raise RuntimeError("no detach")


def test_a_call_that_cannot_be_recorded() -> None:
    handle, net = started(), Net(lambda h: h.as_subclass(Tensor))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    take_step(handle, net, optimizer, x=torch.randn(5, 4).as_subclass(Unrecordable))
    net.faulty.fault = squared
    take_step(handle, net, optimizer)
    assert found_in(handle).location == BIG_TIMES_BIG


def test_an_op_that_cannot_be_looked_at() -> None:
    """Torch has no largest value of float8."""

    def loss(out: Tensor) -> Tensor:
        return mean_square(out.float().to(torch.float8_e4m3fn).float())

    handle = train(Net(), loss=loss, scale=1.0)
    assert modes() == 0
    assert handle.last_overflow is None


def test_a_model_is_exported_in_a_watched_step() -> None:
    handle, net, x = started(64.0), nn.Linear(4, 4), torch.randn(5, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    assert net(x).requires_grad
    exported = torch.export.export(net, (x,))
    take_step(handle, net, optimizer, x=x)
    handle.deactivate()
    assert exported.module()(x).shape == (5, 4)
