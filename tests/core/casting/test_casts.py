"""The casts of one handle: what is cast, and to what; when casts are on, in which thread, and within autocast."""

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
from autoamp.core import CastState
from autoamp.tensors import iter_tensors
from tests.core.casting._shared import CAST_DTYPES, HALVES, in_thread, make, nested, snapshot


def test_disable_and_enable_reach_every_thread_once() -> None:
    casts = CastState(torch.float16, "cpu")
    assert casts.mode() == (False, True)
    for change, on in ((casts.enable, True), (casts.disable, False)) * 2:
        for _ in range(2):
            change()
            assert casts.thread.mode.on is on
            assert in_thread(lambda: casts.thread.mode.on) is on
            with casts.switched(True):
                assert casts.thread.mode.on is on


@pytest.mark.parametrize(("on", "may_cast"), [(True, True), (None, True), (False, False)])
def test_threads_cast_by_default_as_the_handle_says(on: bool | None, may_cast: bool) -> None:
    casts = make(on=on)
    assert casts.on_by_default is may_cast
    assert casts.cache.enabled
    with casts.switched(False):
        assert not casts.begin_call(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("device", "other"), [("meta", "cpu"), ("cpu", "meta"), ("hpu", "meta"), ("xpu", "cpu")])
def test_tensors_of_another_device_type_stay_as_they_are(device: str, other: str) -> None:
    casts, x = make(device=device), torch.ones(2, device=other)
    assert not casts.eligible(x)
    assert casts.to_half(x) is x
    assert casts.promote_args((x, halves := x.half()))[1] is halves


@pytest.mark.parametrize(("device", "other"), [("meta", "cpu"), ("cpu", "meta")])
def test_beside_a_sparse_argument_the_same_tensors_are_cast(device: str, other: str) -> None:
    casts, x = make(device=device), torch.ones(2, device=device)
    sparse = torch.sparse_coo_tensor(size=(2, 2), device=device, check_invariants=False)
    stay = torch.ones(2, dtype=torch.int32, device=device), x.double(), torch.ones(2, device=other)
    assert casts.eligible(x)
    first, *same, last = casts.args_to_half((sparse, *stay, x))
    assert first.dtype is last.dtype is torch.float16
    assert all(one is before for one, before in zip(same, stay, strict=True))


def test_a_region_of_torch_casts_its_own_device_type_and_we_do_not() -> None:
    casts, x = make(), torch.ones(2)
    for device_type, ours in (("cpu", False), ("cuda", True)):
        torch.set_autocast_enabled(device_type, True)
        try:
            assert casts.autocast_rules() is not ours
            assert casts.eligible(x) is ours
            assert (casts.to_half(x) is not x) is ours
            assert (casts.to_fp32(x.half()).dtype is torch.float32) is ours
        finally:
            torch.set_autocast_enabled(device_type, False)
    assert casts.args_to_half((x,))[0].dtype is torch.float16


@given(nested)
def test_promotion_goes_to_fp32_where_dtypes_differ_and_nowhere_else(value: Any) -> None:
    before = snapshot(value)
    after, named = make().promote_args((value, value))
    assert snapshot(value) == before
    assert [t.dtype for t in iter_tensors(named)] == [t.dtype for t in iter_tensors(after)]
    dtypes = {tensor.dtype for tensor in iter_tensors(value)} & set(CAST_DTYPES)
    if len(dtypes) < 2:
        assert after is value
    for old, new in zip(iter_tensors(value), iter_tensors(after), strict=True):
        widened = len(dtypes) > 1 and old.dtype in CAST_DTYPES
        assert new.dtype == (torch.float32 if widened else old.dtype)


# -- what is cast, and to what --


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


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_of_several_sparse_arguments_and_of_odd_ones_nothing_is_cast_to_half() -> None:
    casts, matrix, halves = make(), torch.eye(2).to_sparse(), torch.ones(2, 2).half()
    batch, layouts = torch.ones(2, 2, 2).to_sparse(), (torch.sparse_csr, torch.sparse_csc)
    for sparse, dtype in (
        ([matrix], torch.float16),
        ([matrix, matrix], torch.float32),
        ([batch], torch.float32),
        ([torch.ones(2).to_sparse()], torch.float32),
        *(([torch.eye(2).to_sparse(layout=layout)], torch.float32) for layout in layouts),
        ([matrix.clone().requires_grad_()], torch.float32),
    ):
        assert {tensor.dtype for tensor in casts.args_to_half([*sparse, halves])} == {dtype}
        assert not any(map(casts.eligible, sparse))
        assert casts.to_fp32(sparse) is sparse
    assert casts.args_to_fp32([matrix.half(), halves])[1].dtype is torch.float32
