"""What is cast, and to what: dtypes, devices, layouts, kinds of tensors, and nests of arguments."""

from __future__ import annotations

import types
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import autoamp
from autoamp.tensors import iter_tensors
from tests.casting._shared import CAST_DTYPES, HALVES, make, nested, snapshot


def test_zero_dimensional_tensors_are_cast_and_scalars_are_not() -> None:
    casts = make()
    assert casts.to_half(torch.tensor(1.0)).dtype == torch.float16
    for scalar in (1, 2.5, True, 1j, None, "a", torch.float32, torch.Size([2])):
        assert casts.to_half(scalar) is scalar


def test_an_argument_that_stays_ends_no_walk_over_the_others() -> None:
    stay = 1, torch.ones(2).half(), torch.ones(2, dtype=torch.int32), torch.ones(2, device="meta"), object()
    *same, first, last = make().args_to_half((*stay, [2, torch.ones(2)], torch.ones(2)))
    assert all(one is before for one, before in zip(same, stay, strict=True))
    assert first[1].dtype is last.dtype is torch.float16


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_matrix_is_cast_in_one_layout_only(layout: torch.layout) -> None:
    casts = make()
    sparse = torch.eye(2).to_sparse(layout=layout, blocksize=(1, 1) if layout == torch.sparse_bsr else None)
    assert not casts.eligible(sparse)
    is_matrix = layout is torch.sparse_coo
    assert (casts.to_half(sparse).dtype, casts.to_half([torch.ones(1), sparse])[0].dtype) == (
        (torch.float16, torch.float16) if is_matrix else (torch.float32, torch.float32)
    )
    assert casts.to_fp32(sparse) is sparse


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_cast(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    cast = make().to_half(tensor)
    assert cast.is_nested
    assert cast.layout == layout
    assert cast.dtype == torch.float16


class Tagged(Tensor):
    """A subclass that knows what was called on it."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_keep_their_type() -> None:
    tensor = torch.ones(2).as_subclass(Tagged)
    assert type(make().to_half(tensor)) is Tagged
    assert Tensor.half in Tagged.calls


@given(nested, st.sampled_from(HALVES))
def test_nests_are_never_mutated_and_get_the_right_dtypes(value: Any, half: torch.dtype) -> None:
    casts = make(half)
    for cast, target in ((casts.to_half, half), (casts.to_fp32, torch.float32)):
        before = snapshot(value)
        after = cast(value)
        assert snapshot(value) == before
        for old, new in zip(iter_tensors(value), iter_tensors(after), strict=True):
            assert new.dtype == (target if old.dtype in CAST_DTYPES else old.dtype)
            assert (new is old) == (new.dtype == old.dtype)
            assert casts.eligible(old) == (old.dtype in CAST_DTYPES)


@pytest.mark.parametrize("kind", [list, tuple, namedtuple("Pair", "a b")._make], ids=["list", "tuple", "namedtuple"])
def test_a_function_gets_its_own_kind_of_sequence(kind: Any) -> None:
    module, seen = types.ModuleType("some_program"), list[Any]()
    module.join = seen.append  # type: ignore[attr-defined]
    autoamp.register_half_function(module, "join")
    autoamp.init(dtype=torch.float16, device_type="cpu")
    given = kind([torch.ones(2), Parameter(torch.ones(2))])
    module.join(given)
    assert type(seen[0]) is type(given)
    assert [item.dtype for item in seen[0]] == [torch.float16] * 2


def test_of_several_sparse_arguments_and_of_odd_ones_nothing_is_cast_to_half() -> None:
    casts, matrix, halves = make(), torch.eye(2).to_sparse(), torch.ones(2, 2).half()
    batch, compressed = torch.ones(2, 2, 2).to_sparse(), torch.eye(2).to_sparse_csr()
    for sparse, dtype in (
        ([matrix], torch.float16),
        ([matrix, matrix], torch.float32),
        ([batch], torch.float32),
        ([torch.ones(2).to_sparse()], torch.float32),
        ([compressed], torch.float32),
        ([matrix.clone().requires_grad_()], torch.float32),
    ):
        assert {tensor.dtype for tensor in casts.args_to_half([*sparse, halves])} == {dtype}
    assert casts.args_to_fp32([matrix.half(), halves])[1].dtype is torch.float32
