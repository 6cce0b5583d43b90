"""The casts of one handle: when they are on, how another thread gets them, promotion, and autocast regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from autoamp.tensors import iter_tensors
from tests.casting._shared import CAST_DTYPES, in_thread, make, nested, snapshot


def test_shut_and_open_reach_every_thread() -> None:
    casts = make()
    casts.shut()
    assert not casts.local.on
    assert not in_thread(lambda: casts.local.on)
    casts.open()
    assert casts.local.on
    assert in_thread(lambda: casts.local.on)


def test_two_handles_have_switches_of_their_own() -> None:
    one, other = make(), make()
    one.shut()
    assert other.local.on
    with other.switched(False):
        one.open()
        assert one.local.on


def test_nothing_but_enabled_turns_on_a_thread_that_is_off_by_default() -> None:
    casts = make(on=False)

    def switched() -> bool:
        with casts.switched(True):
            return bool(casts.local.on)

    assert not switched()
    with casts.switched(True, forced_off=False):
        assert switched()
    assert not switched()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("forced_off", [True, False])
def test_switches_are_set_in_another_thread_as_they_are_here(on: bool, forced_off: bool) -> None:
    casts = make()
    with casts.switched(on, forced_off):
        switches = casts.switches()

    def there() -> tuple[Any, Any]:
        with casts.switched(*switches):
            return casts.local.on, casts.local.forced_off

    assert in_thread(there) == (on, forced_off)


def test_autocast_of_another_device_type_leaves_tensors_to_us() -> None:
    casts = make(torch.float16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not casts.autocast_rules()
        assert casts.eligible(torch.ones(1))
    finally:
        torch.set_autocast_enabled("cuda", False)


@settings(deadline=None, max_examples=150)
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
