"""Half parameters and their masters, pairwise: who follows whom where one of them is written to from outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.errors import UsageError
from autoamp.stepping import MasterWeights, master_of, release_master
from tests.stepping.networks import backward, equal, masters, network, o2, sgd


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


def clamp_data(p: Tensor) -> None:
    p.data.clamp_(-0.1, 0.1)


def mul(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def copy_in(p: Tensor) -> None:
    with torch.no_grad():
        p.copy_(torch.full_like(p, 0.25))


def assign_data(p: Tensor) -> None:
    p.data = torch.full_like(p, 0.75)


@pytest.mark.parametrize("write", [mul, copy_in, assign_data])
def test_masters_follow_what_is_written(write: Callable[[Tensor], None]) -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    untouched = masters(optimizer)[1].detach().clone()
    write(model[0].weight)
    written = model[0].weight.detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(model[0].weight, written)
    assert torch.equal(masters(optimizer)[0].half(), written)
    assert torch.equal(masters(optimizer)[1], untouched)


@pytest.mark.parametrize("write", [clamp_data, mul, copy_in, assign_data])
def test_what_is_written_before_the_first_step_reaches_the_masters(write: Callable[[Tensor], None]) -> None:
    """As with Apex, which made its masters then: programs load weights through ``.data`` after initialize()."""
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    untouched = masters(optimizer)[1].detach().clone()
    write(model[0].weight)
    written = model[0].weight.detach().clone()
    assert torch.equal(model.state_dict()["0.weight"].half(), written)
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(masters(optimizer)[0].half(), written)
    assert torch.equal(model[0].weight, written)
    assert torch.equal(masters(optimizer)[1], untouched)


def clamp_master(p: Tensor) -> None:
    with torch.no_grad():
        p.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("write", "steps"),
    # What torch does not report is told in halves alone before the first step.
    [(write, steps) for write in (clamp_data, clamp_master, assign_data) for steps in (0, 1, 2)][1:],
)
def test_what_is_written_into_masters_stays(write: Callable[[Tensor], None], steps: int, half: torch.dtype) -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer, dtype=half)
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
    write(masters(optimizer)[0])
    written = masters(optimizer)[0].detach().clone()
    assert torch.equal(model.state_dict()["0.weight"], written)
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(masters(optimizer)[0], written)
    assert torch.equal(model[0].weight, written.to(half))


def test_masters_win_over_a_write_that_nothing_tells_of() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    before = masters(optimizer)[0].detach().clone()
    clamp_data(model[0].weight)
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(masters(optimizer)[0], before)
    assert torch.equal(model[0].weight, before.half())
    clamp_data(model[0].weight)
    autoamp.current_handle().masters_from_model()  # type: ignore[union-attr]
    written = model[0].weight.detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(model[0].weight, written)
    assert torch.equal(masters(optimizer)[0].half(), written)
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


def test_elements_that_were_not_written_keep_their_low_bits() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    before = masters(optimizer)[0].detach().clone()
    with torch.no_grad():
        model[0].weight[0] = 3.0
    optimizer.step()
    assert torch.equal(masters(optimizer)[0][1:], before[1:])
    assert masters(optimizer)[0][0].tolist() == [3.0] * 4


def test_writes_of_nan_and_inf_are_seen() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0, momentum=0)
    o2(model, optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
        model[0].bias[1] = torch.inf
    assert master_of(model[0].weight)[0, 0].isnan()
    assert master_of(model[0].bias)[1].isinf()


def test_weights_loaded_after_initialize_reach_the_masters_unrounded() -> None:
    model, other = network(), network()
    with torch.no_grad():
        other[0].weight.add_(1.0001)
    optimizer = sgd(model.parameters(), lr=0.0)
    o2(model, optimizer)
    model.load_state_dict(other.state_dict())
    assert equal([m.detach() for m in masters(optimizer)], [p.detach() for p in other.parameters()])


def test_release_master_forgets() -> None:
    model = network().half()
    optimizer = sgd(model.parameters())
    MasterWeights(optimizer)
    master = master_of(model[0].weight)
    assert release_master(model[0].weight) is master
    assert master_of(model[0].weight) is None
