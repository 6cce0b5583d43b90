"""Whether wrappers reduce all gradients of an optimizer. Which looks at gradients that saves:
tests/integration/test_second_look.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp.stepping.reduced import Reduced, wrappers_of

pytestmark = pytest.mark.usefixtures("one_process")


def test_what_a_wrapper_has_is_reduced_as_long_as_it_is_there(collected: Any) -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    params = list(wrapper.parameters())
    assert wrappers_of(params) == [wrapper]
    assert wrappers_of([torch.ones(2)]) == []
    reduced = Reduced(params, [wrapper])
    assert reduced.has_all(params)
    assert reduced.has_all([*params])
    del wrapper
    collected()
    assert not reduced.has_all(params)


def test_wrappers_may_have_a_part_each() -> None:
    wrappers = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    params = [param for wrapper in wrappers for param in wrapper.parameters()]
    assert set(wrappers_of(params)) == set(wrappers)
    assert Reduced(params, wrappers).has_all(params)
    assert not Reduced(params, wrappers[:1]).has_all(params)


def test_other_parameters_end_it() -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    params = list(wrapper.parameters())
    for others in (params[:1], params[::-1], [*params, torch.ones(2)], [params[0], params[1].clone()]):
        reduced = Reduced(params, [wrapper])
        assert not reduced.has_all(others)
        # They are not kept.
        assert not reduced.has_all(params)


def test_what_no_wrapper_reduces_is_not_reduced() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight"])
    wrapper = DistributedDataParallel(net)
    params = list(net.parameters())
    assert not Reduced(params, wrappers_of(params)).has_all(params)
    kept = [param for param in params if param is not net[1].weight]
    assert Reduced(kept, wrappers_of(kept)).has_all(kept)
    plain = list(nn.Linear(2, 2).parameters())
    assert not Reduced(plain, wrappers_of(plain)).has_all(plain)
    assert not Reduced([], [wrapper]).has_all([])


def test_a_group_of_some_processes_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    params = list(wrapper.parameters())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not Reduced(params, [wrapper]).has_all(params)


def test_masters_are_reduced_where_their_halves_are() -> None:
    net: Any = nn.Linear(2, 2)
    net, optimizer = autoamp.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O2", device_type="cpu", verbosity=0
    )
    try:
        wrapper = DistributedDataParallel(net)
        masters = optimizer.param_groups[0]["params"]
        assert masters[0].dtype is torch.float32
        assert net.weight.dtype is not torch.float32
        assert wrappers_of(masters) == [wrapper]
        assert Reduced(masters, [wrapper]).has_all(masters)
    finally:
        autoamp.current_handle().deactivate()
