"""A thread's two switches: set, nested, put back, and each thread's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.casting._shared import in_thread, make


def test_switched_and_nested() -> None:
    casts = make()
    assert casts.local.on
    with casts.switched(False):
        assert not casts.local.on
        with casts.switched(True):
            assert casts.local.on
        assert not casts.local.on
    assert casts.local.on


def test_replacements_need_not_look_at_their_thread_only_where_all_threads_cast() -> None:
    assert not make().deviations
    for by_default in (False, None):
        assert make(on=by_default).deviations
    casts = make()
    with casts.switched(False):
        assert casts.deviations
    assert not casts.deviations


def test_disabled_holds_whatever_is_within() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        assert not casts.local.on
        with casts.switched(True):
            assert not casts.local.on
        with casts.switched(False, forced_off=True):
            assert not casts.local.on
        assert not casts.local.on
        with casts.switched(True, forced_off=False):
            assert casts.local.on
        assert not casts.local.on
    assert casts.local.on


@pytest.mark.parametrize(
    ("by_default", "switches"), [(True, (False,)), (True, (False, True)), (False, (True, False))],
    ids=["yielding", "forced off", "forced on"],
)  # fmt: skip
def test_a_switch_is_put_back_after_an_exception(by_default: bool, switches: tuple[bool, ...]) -> None:
    casts = make(on=by_default)

    def fail() -> None:
        with casts.switched(*switches):
            assert casts.local.on is not by_default
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert casts.local.on is by_default
    assert not vars(casts.local)


@pytest.mark.parametrize("outer", [(None, None), (False, None), (False, True), (True, False)])
@pytest.mark.parametrize("inner", [(None, None), (True, None), (False, True), (True, False), (True, True)])
def test_a_token_puts_back_both_switches(outer: tuple[Any, Any], inner: tuple[Any, Any]) -> None:
    casts = make()
    with casts.switched(*outer):
        before, asked = dict(vars(casts.local)), list(casts.deviations)
        token = casts.local.set(*inner)
        assert len(casts.deviations) == len(asked) + 1
        casts.local.reset(token)
        assert vars(casts.local) == before
        assert casts.deviations == asked


def test_a_function_with_casts_off_puts_back_what_was_there() -> None:
    casts = make()
    casts.open()

    def fail() -> None:
        assert casts.local.on is False
        raise KeyError

    for outer in ((None,), (True,), (False,)):
        with casts.switched(*outer):
            before, asked = dict(vars(casts.local)), list(casts.deviations)
            with pytest.raises(KeyError):
                casts.local.bound(fail, False)()
            assert vars(casts.local) == before
            assert casts.deviations == asked


def test_switches_are_each_thread_s_own() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        assert in_thread(lambda: casts.local.on)
    off = make(on=False)
    with off.switched(True, forced_off=False):
        assert off.local.on
        assert not in_thread(lambda: off.local.on)
