"""Gradients are not looked through again for nothing, and are where anything may have come. With several ranks:
tests/integration/test_agreement.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from autoamp.scaling import unchanged
from autoamp.scaling.unchanged import Looked, collectives_so_far


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_nobody_touched_is_as_it_was() -> None:
    grads = [torch.ones(2), torch.ones(3)]
    looked = Looked(grads)
    assert looked.still_holds(lambda: grads)
    assert looked.still_holds(lambda: [*grads])
    grads[0].sum()
    assert looked.still_holds(lambda: grads)


EXCHANGES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "of a group of its own": lambda grad: dist.all_reduce(grad, group=dist.new_group([0])),
    "awaited": lambda grad: dist.all_reduce(grad, async_op=True).wait(),
    "by the group itself": lambda grad: dist.group.WORLD.allreduce([grad]).wait(),  # type: ignore[union-attr]
    "broadcast": lambda grad: dist.broadcast(grad, 0),
    "gathered": lambda grad: dist.all_gather([torch.empty_like(grad)], grad),
    "scattered": lambda grad: dist.reduce_scatter(grad, [grad.clone()]),
    "all to all": lambda grad: dist.all_to_all_single(grad, grad.clone()),
    "functional": lambda grad: functional.wait_tensor(functional.all_reduce(grad, "sum", dist.group.WORLD)),
    "objects": lambda grad: dist.all_gather_object([None], 1),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_what_is_exchanged_is_noticed(exchange: Callable[[Tensor], Any]) -> None:
    grads = [torch.ones(2), torch.ones(3)]
    looked = Looked(grads)
    exchange(grads[1])
    assert not looked.still_holds(lambda: grads)
    assert Looked(grads).still_holds(lambda: grads)


def test_other_gradients_are_others() -> None:
    grads = [torch.ones(2), torch.ones(2)]
    looked = Looked(grads)
    assert not looked.still_holds(lambda: grads[:1])
    assert not looked.still_holds(lambda: [*grads, torch.ones(2)])
    assert not looked.still_holds(lambda: grads[::-1])
    assert not looked.still_holds(lambda: [grads[0], grads[1].clone()])
    assert looked.still_holds(lambda: grads)
    grads[1].mul_(2.0)
    assert not looked.still_holds(lambda: grads)


def test_no_gradient_is_kept_alive() -> None:
    grads = [torch.ones(2)]
    looked = Looked(grads)
    grads[0] = torch.ones(2)
    assert not looked.still_holds(lambda: grads)


def test_what_does_not_count_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        uncounted = [torch.ones(2)]
    assert not Looked(uncounted).still_holds(lambda: uncounted)
    grads = [torch.ones(2)]
    looked = Looked(grads)
    for groups in ({}, {dist.group.WORLD: ("nccl", None)}, {dist.group.WORLD: ("cpu:gloo,cuda:nccl", None)}):
        monkeypatch.setattr(unchanged, "process_groups", lambda groups=groups: groups)
        assert collectives_so_far() is None
        assert not looked.still_holds(lambda: grads)
        assert not Looked(grads).still_holds(lambda: grads)
