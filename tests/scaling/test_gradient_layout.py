"""Tensors that are like those of before are told from others in one call, and nothing is taken for like that is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp.scaling import gradient_layout
from autoamp.scaling.gradient_layout import GradientLayout

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


def three(**kwargs: Any) -> list[Tensor]:
    return [torch.randn(2, 3, **kwargs), torch.randn(4, 4, **kwargs), torch.randn((), **kwargs)]


def learnt(tensors: list[Tensor]) -> GradientLayout[str]:
    known: GradientLayout[str] = GradientLayout()
    known.learn(tensors, "first")
    known.learn(tensors, "second")
    return known


def in_inference_mode(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return make()


def test_tensors_that_are_like_those_learnt_are_known(device: str) -> None:
    known = learnt(three(device=device))
    assert known.recall(three(device=device)) == "second"
    with torch.no_grad():
        assert known.recall(three(device=device)) == "second"


def test_nothing_is_learnt_of_what_came_once() -> None:
    known: GradientLayout[str] = GradientLayout()
    assert known.recall([]) is None
    known.learn(three(), "value")
    assert known.recall(three()) is None
    known.learn(three()[:2], "value")
    assert known.recall(three()[:2]) is None
    assert known.recall(three()) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.zeros(4, 4, dtype=torch.float16),
        lambda: torch.zeros(4, 4, dtype=torch.int32),
        lambda: torch.zeros(4, 4, dtype=torch.complex64),
        lambda: torch.zeros(4, 4, device="meta"),
        lambda: torch.zeros(4, 4).to_sparse(),
        lambda: torch.zeros(4, 4).to_sparse_csr(),
        lambda: torch.zeros(4, 4).t(),
        lambda: torch.zeros(4, 8)[:, ::2],
        lambda: torch.zeros(1, 4).expand(4, 4),
        lambda: torch.zeros(16).as_strided((4, 4), (1, 1)),
        lambda: torch.zeros(4, 5),
        lambda: torch.zeros(16),
        lambda: torch._neg_view(torch.zeros(4, 4)),
        lambda: Parameter(torch.zeros(4, 4)),
        lambda: in_inference_mode(lambda: torch.zeros(4, 4)),
    ],
)
def test_one_other_tensor_makes_all_unknown(other: Callable[[], Tensor]) -> None:
    known = learnt(three())
    first, _, last = three()
    assert known.recall([first, other(), last]) is None
    assert known.recall(three()) == "second"


def test_other_numbers_and_orders_are_unknown() -> None:
    known = learnt(three())
    first, second, last = three()
    assert known.recall([first, second]) is None
    assert known.recall([first, second, last, last]) is None
    assert known.recall([second, first, last]) is None


@pytest.mark.parametrize("shape", [(3,), (), (0,)])
def test_a_tensor_that_comes_twice_is_seen(shape: tuple[int, ...]) -> None:
    known = learnt([torch.zeros(shape), torch.zeros(shape)])
    one = torch.zeros(shape)
    assert known.recall([one, one]) is None
    assert known.recall([one, torch.zeros(shape)]) == "second"


def test_in_inference_mode_nothing_is_learnt_or_known() -> None:
    known = learnt(three())
    with torch.inference_mode():
        assert known.recall(three()) is None
        inside = learnt(three())
        assert inside.recall(three()) is None
    assert inside.recall(three()) is None
    assert known.recall(three()) == "second"


def test_nothing_is_learnt_of_tensors_of_other_classes() -> None:
    parameters: list[Tensor] = [Parameter(tensor) for tensor in three()]
    assert learnt(parameters).recall(parameters) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nothing_is_learnt_of_tensors_without_strides() -> None:
    nested = [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), torch.zeros(2)]
    assert learnt(nested).recall(nested) is None


def test_what_changes_is_learnt_anew_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check_of = gradient_layout._check_of
    monkeypatch.setattr(gradient_layout, "_check_of", lambda tensors: checks.append(len(tensors)) or check_of(tensors))
    known = learnt([torch.zeros(1)] * 5)
    for size in range(2, 100):
        tensors = [torch.zeros(size) for _ in range(5)]
        assert known.recall(tensors) is None
        known.learn(tensors, str(size))
        assert known.recall(tensors) == (str(size) if checks.count(5) < 8 or size == 8 else None)
    assert checks.count(5) == 8


def refuses(*tensors: Tensor, **kwargs: Any) -> Any:
    raise TypeError("other arguments")


class Objects(TorchDispatchMode):
    """A mode of the program's that allows nothing but what gradients take."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


def test_a_mode_of_the_program_may_object() -> None:
    tensors = three()
    with Objects():
        assert learnt(tensors).recall(tensors) is None


class Blind:
    """A check that takes all tensors for alike."""

    def __init__(self, *tensors: Tensor, **kwargs: Any) -> None:
        pass

    def check(self, *tensors: Tensor) -> bool:
        return True


@pytest.mark.parametrize("found", [refuses, Blind, None])
def test_another_torch_teaches_nothing(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_layout, "TENSOR_GUARDS", found)
    assert learnt(three()).recall(three()) is None


def test_no_tensor_is_kept_alive() -> None:
    tensors = three()
    references = [*map(weakref.ref, tensors)]
    known = learnt(tensors)
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert known.recall(three()) == "second"
