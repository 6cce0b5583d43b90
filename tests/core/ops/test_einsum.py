"""An einsum that sums products is cast by the lists; one that contracts nothing promotes its operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp

FP32 = torch.float32
SHAPES = {1: (4,), 2: (4, 4), 3: (4, 4, 4)}

CONTRACTIONS = {
    "ij,jk->ik": (2, 2),
    "ij,jk": (2, 2),
    " i j , j k -> i k ": (2, 2),
    "bij,bjk->bik": (3, 3),
    "...ij,...jk->...ik": (3, 3),
    "...i,...i": (2, 2),
    "i,i": (1, 1),
    "i,i->": (1, 1),
    "bi,bi->b": (2, 2),
    "...i,...i->i": (2, 2),
    "ij,jk,kl->il": (2, 2, 2),
    "i,j,jk->ik": (1, 1, 2),
}
OTHERS = {
    "i,j->ij": (1, 1),
    "i,j": (1, 1),
    # An index of one operand alone is summed in fp32 before anything is multiplied.
    "i,j->i": (1, 1),
    "ii,j->j": (2, 1),
    "b,bij->b": (1, 3),
    "ij,k->": (2, 1),
    # An ellipsis that stands for no dimensions.
    "i...,i...->i": (1, 1),
    "i,j,k->ijk": (1, 1, 1),
    "b,bij->bij": (1, 3),
    "ij,ij->ij": (2, 2),
    "...,...->...": (2, 2),
    "...i,...j->...ij": (2, 2),
    "ii->i": (2,),
    "ii": (2,),
    "ij->ji": (2,),
    "ij->i": (2,),
    "...ij->...ji": (3,),
    "i->": (1,),
}


def operands(dims: tuple[int, ...], *dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SHAPES[dim]).to(dtypes[n % len(dtypes)]) for n, dim in enumerate(dims)]


@pytest.mark.parametrize("equation", CONTRACTIONS)
def test_a_contraction_is_cast_to_half(half: torch.dtype, equation: str) -> None:
    given = operands(CONTRACTIONS[equation], FP32)
    reference = torch.einsum(equation, *(one.to(half) for one in given))
    autoamp.init(device_type="cpu", dtype=half)
    for found in (
        torch.einsum(equation, *given), torch.einsum(equation, given), torch.functional.einsum(equation, *given)
    ):  # fmt: skip
        assert found.dtype is half
        assert torch.equal(found, reference)


@pytest.mark.parametrize("equation", OTHERS)
def test_what_contracts_nothing_promotes(half: torch.dtype, equation: str) -> None:
    dims = OTHERS[equation]
    for dtypes in ((FP32,), (half,), (half, FP32), (FP32, half)):
        given = operands(dims, *dtypes)
        widest = half if all(one.dtype is half for one in given) else FP32
        reference = torch.einsum(equation, *(one.to(widest) for one in given))
        autoamp.init(device_type="cpu", dtype=half)
        for found in (torch.einsum(equation, *given), torch.einsum(equation, given)):
            assert found.dtype is widest
            assert torch.equal(found, reference)
        autoamp.current_handle().deactivate()


def test_lists_of_indices_promote(half: torch.dtype) -> None:
    one, two = operands((2, 2), half, FP32)
    reference = torch.einsum(one.float(), [0, 1], two, [1, 2], [0, 2])
    autoamp.init(device_type="cpu", dtype=half)
    assert torch.equal(torch.einsum(one, [0, 1], two, [1, 2], [0, 2]), reference)


@pytest.mark.parametrize(("policy", "dtype"), [("fp32", FP32), ("promote", torch.float16), ("none", torch.float16)])
def test_another_policy_is_that_of_each_equation(policy: str, dtype: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=torch.float16, lists={policy: ["einsum"]})
    for equation, dims in (CONTRACTIONS | OTHERS).items():
        assert torch.einsum(equation, *operands(dims, torch.float16)).dtype is dtype


def test_gradients_of_an_outer_product_are_those_of_fp32(half: torch.dtype) -> None:
    t, inv_freq = torch.arange(4096.0), (1 / 10000 ** (torch.arange(0, 64, 2) / 64)).requires_grad_()
    reference = torch.autograd.grad(torch.einsum("i,j->ij", t, inv_freq).cos().sum(), inv_freq)
    autoamp.init(device_type="cpu", dtype=half)
    found = torch.autograd.grad(torch.einsum("i,j->ij", t, inv_freq).cos().sum(), inv_freq)
    assert torch.equal(found[0], reference[0])


@pytest.mark.parametrize(
    "args", [(), (torch.ones(2), 5), (torch.ones(2), None, [0]), ("i->i",), (5,), ("ij,jk->ik", 3)]
)
def test_a_wrong_call_has_torchs_own_error(args: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as plain:  # noqa: PT011
        torch.einsum(*args)
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with pytest.raises(plain.type) as found:
        torch.einsum(*args)
    assert str(found.value) == str(plain.value)
