"""Whether tensors are like earlier ones: one call says what sweeps over all of them do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

autoamp_kernels = pytest.importorskip("autoamp_kernels")
from autoamp_kernels import likeness  # noqa: E402
from autoamp_kernels.likeness import Likeness  # noqa: E402
from autoamp_kernels.tables import Role, Tables  # noqa: E402

ROLES = Role("params", written=True), Role("grads", (torch.float32, torch.bfloat16))


def given() -> list[Tensor]:
    return [torch.ones(2, 3), torch.ones(4)]


@pytest.mark.parametrize(
    "other",
    [
        lambda: [torch.ones(2, 3)],
        lambda: [torch.ones(2, 3), torch.ones(5)],
        lambda: [torch.ones(2, 3), torch.ones(4, 1)],
        lambda: [torch.ones(3, 2).t(), torch.ones(4)],
        lambda: [torch.ones(2, 3), torch.ones(4).bfloat16()],
        lambda: [torch.ones(2, 3), torch.ones(4, device="meta")],
        lambda: [torch.ones(2, 3), torch.ones(1).expand(4)],
        lambda: [torch.ones(2, 3), torch.nn.Parameter(torch.ones(4))],
    ],
)
def test_what_is_alike(other: Callable[[], list[Tensor]]) -> None:
    assert not Likeness().holds(given())
    alike = Likeness().learnt(first := given())
    assert alike.holds(given())
    assert not alike.holds(other())
    kept = weakref.ref(first[0])
    del first
    assert kept() is None


def test_a_layout_is_learnt_when_it_comes_again_and_all_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    order: Any = likeness.torch.Tensor.is_contiguous
    monkeypatch.setattr("autoamp_kernels.tables._is_contiguous", lambda tensor: sweeps.append(1) or order(tensor))
    tables, params = Tables(), given()

    def table(grads: list[Tensor]) -> int:
        sweeps.clear()
        column = tables.table("kernel", ROLES, (params, grads)).columns["grads"]
        assert column.pointers.tolist() == [grad.data_ptr() for grad in grads]
        assert column.sizes.tolist() == [grad.numel() * grad.itemsize for grad in grads]
        return len(sweeps)

    kept = [given() for _ in range(5)]
    assert [bool(table(grads)) for grads in kept] == [True, True, False, False, False]
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"grads\[0\] is not contiguous"):
        table([torch.ones(3, 2).t(), torch.ones(4)])
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"grads\[1\] has 5 elements; it must have 4"):
        table([torch.ones(2, 3), torch.ones(5)])
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"grads\[1\] and params\[1\] share memory"):
        table([torch.ones(2, 3), params[1].view(4)])
    assert table([torch.ones(2, 3).bfloat16(), torch.ones(4).bfloat16()])
    assert table(kept[0])


def test_without_torchs_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_guards", lambda: None)
    likeness._can_tell.cache_clear()
    try:
        assert not Likeness().learnt(given()).holds(given())
    finally:
        likeness._can_tell.cache_clear()


def test_states_that_were_replaced_are_checked_anew() -> None:
    tables, params = Tables(), given()
    roles = (*ROLES, Role("states", written=True, state=True))
    states = given()
    table = tables.table("kernel", roles, (params, given(), states))
    assert table.columns["states"].sizes.tolist() == [24, 16]
    states[1] = torch.ones(3)
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"states\[1\] has 3 elements; it must have 4"):
        tables.table("kernel", roles, (params, given(), states))
