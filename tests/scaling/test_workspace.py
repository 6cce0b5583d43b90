"""Half tensors widened in memory that is taken again: their values, whoever comes next, and what has no place there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoamp.scaling import Workspace, limit_of, workspace


def halves(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_the_next_call_takes_the_same_memory() -> None:
    space, shapes = Workspace(), ((3, 4), (5,))
    places = []
    for seed in range(4):
        given = halves(*shapes, seed=seed)
        wide = space.widened(given, 0)
        assert all(torch.equal(one, other.float()) for one, other in zip(wide, given, strict=True))
        places.append(addresses(wide))
    # Also where it was learnt that they are like the last ones, and for others.
    others = halves((2, 2), (7,))
    wide = space.widened(others, 1)
    assert all(torch.equal(one, other.float()) for one, other in zip(wide, others, strict=True))
    assert [*places, addresses(wide)[:1]] == [places[0]] * 4 + [places[0][:1]]


@pytest.mark.parametrize("odd", ["turned", "meta", "many"])
def test_what_has_no_place_there_is_widened_anew(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = halves((3, 4))
    if odd == "many":
        monkeypatch.setattr(workspace, "_ON_CPU", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    else:
        given = [given[0].t() if odd == "turned" else given[0].to("meta")]
    space = Workspace()
    first, second = (space.widened(given, 0)[0] for _ in range(2))
    assert first.dtype is torch.float32
    assert first.stride() == given[0].stride()
    assert first is not second
    if odd != "meta":
        assert torch.equal(first, given[0].float())
        assert first.data_ptr() != second.data_ptr()


def test_so_many_are_widened_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert limit_of(5, on_cpu=True) == 3 * 2**20
    # Elsewhere half of them, but few at once, and not more than keep a device busy.
    assert [limit_of(total, on_cpu=False) for total in (10, 2**20, 2**30)] == [2**17, 2**19, 2**24]
