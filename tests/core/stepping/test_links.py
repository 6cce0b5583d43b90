"""A half parameter and its fp32 master: which of the two takes the value of the other when a program writes to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.core import master_of
from autoamp.errors import UsageError
from tests.core.stepping.networks import backward, masters, network, o2, sgd


def test_a_parameter_of_two_optimizers_has_one_master() -> None:
    model = network()
    one, two = sgd(model.parameters(), momentum=0), sgd(model[0].parameters(), momentum=0)
    o2(model, one, two)
    assert masters(one)[0] is masters(two)[0]
    before = masters(one)[0].detach().clone()
    backward(model, [one, two])
    grad = masters(one)[0].grad.clone()
    one.step()
    two.step()
    torch.testing.assert_close(masters(one)[0].detach(), before - 0.2 * grad)
    assert torch.equal(model[0].weight, masters(one)[0].half())
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    assert masters(one)[0] is masters(two)[0] is model[0].weight
    assert model[0].weight.dtype is torch.float32


# Torch reports all writes but those through `.data`.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda p: p.data.clamp_(-0.1, 0.1),
    "mul": lambda p: p.mul_(0.5),
    "copy": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "new data": lambda p: setattr(p, "data", torch.full_like(p, 0.75)),
}


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_model_reaches_the_master(write: str, steps: int) -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
    before = [tensor.detach().clone() for tensor in masters(optimizer)]
    with torch.no_grad():
        WRITES[write](model[0].weight)
    # Programs load weights through `.data` before the first step. After it the master is authoritative.
    written = before[0].half() if write == "data" and steps else model[0].weight.detach().clone()
    assert torch.equal(model.state_dict()["0.weight"].half(), written)
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(model[0].weight, written)
    assert torch.equal(masters(optimizer)[0].half(), written)
    assert torch.equal(masters(optimizer)[1], before[1])


def test_masters_from_model_takes_writes_that_torch_does_not_report() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    before = masters(optimizer)[0].detach().clone()
    model[0].weight.data.clamp_(-0.1, 0.1)
    autoamp.current_handle().masters_from_model()  # type: ignore[union-attr]
    written = model[0].weight.detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(model[0].weight, written)
    assert torch.equal(masters(optimizer)[0].half(), written)
    # Elements that were not written to keep their low bits.
    kept = before.abs() < 0.09
    assert kept.any()
    assert torch.equal(masters(optimizer)[0][kept], before[kept])


def test_a_half_parameter_that_was_sharded_is_refused() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer, loss_scale=1.0)
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data[:2]
    with pytest.raises(UsageError, match=r"shape \(2, 4\) has a master of shape \(8, 4\).*make the optimizer after"):
        optimizer.step()


def test_a_write_to_some_elements_leaves_the_low_bits_of_others() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    before = masters(optimizer)[0].detach().clone()
    with torch.no_grad():
        model[0].weight[0] = 3.0
        model[0].weight[1, 0] = torch.nan
        model[0].bias[1] = torch.inf
    assert master_of(model[0].weight)[0].tolist() == [3.0] * 4
    assert master_of(model[0].weight)[1, 0].isnan()
    assert master_of(model[0].bias)[1].isinf()
    assert torch.equal(masters(optimizer)[0][2:], before[2:])
