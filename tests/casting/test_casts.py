"""The casts of one handle: when they are on, how another thread gets them, promotion, and autocast regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from autoamp.casting import CastState
from autoamp.tensors import iter_tensors
from tests.casting._shared import CAST_DTYPES, in_thread, make, nested, snapshot


def test_shut_and_open_reach_every_thread_once() -> None:
    casts = CastState(torch.float16, "cpu")
    assert casts.mode() == (False, True)
    for change, on in ((casts.open, True), (casts.shut, False)) * 2:
        for _ in range(2):
            change()
            assert casts.local.mode.on is on
            assert in_thread(lambda: casts.local.mode.on) is on
            with casts.switched(True):
                assert casts.local.mode.on is on


@pytest.mark.parametrize(("on", "may_cast"), [(True, True), (None, True), (False, False)])
def test_threads_cast_by_default_as_the_handle_says(on: bool | None, may_cast: bool) -> None:
    casts = make(on=on)
    assert casts.on_by_default is may_cast
    assert casts.cache.enabled
    with casts.switched(False):
        # An optimizer's closure casts again, in whatever module it is called.
        with casts.evaluating():
            assert casts.local.mode.on is may_cast
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
            assert (casts.args_to_half((x,))[0] is not x) is ours
            assert (casts.args_to_fp32((x.half(),))[0].dtype is torch.float32) is ours
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
