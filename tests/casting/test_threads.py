"""A thread's two switches: set, nested, put back, and each thread's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.casting._shared import in_thread, make


def test_switched_and_nested() -> None:
    casts = make()
    seen = []
    for switches in ((False,), (True,), (None,)):
        with casts.switched(False), casts.switched(*switches):
            seen.append(casts.local.switches.on)
    assert seen == [False, True, True]
    assert casts.local.switches.on


def test_disabled_holds_whatever_is_within() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        for switches, on in (((True,), False), ((False, True), False), ((True, False), True)):
            with casts.switched(*switches):
                assert casts.local.switches.on is on
            assert not casts.local.switches.on
    assert casts.local.switches.on


SWITCHES = [(None, None), (True, None), (False, None), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("by_default", [True, False])
@pytest.mark.parametrize("outer", SWITCHES)
@pytest.mark.parametrize("inner", SWITCHES)
def test_both_switches_are_put_back(by_default: bool, outer: tuple[Any, Any], inner: tuple[Any, Any]) -> None:
    casts, seen = make(on=by_default), []

    def fail() -> None:
        seen.append(casts.switches())
        raise KeyError

    def fail_within() -> None:
        with casts.switched(*inner):
            fail()

    with casts.switched(*outer):
        before = dict(vars(casts.local.switches))
        for function in (fail_within, casts.local.bound(fail, *inner)):
            with pytest.raises(KeyError):
                function()
            assert vars(casts.local.switches) == before
    assert casts.local.switches.on is by_default
    assert seen[0] == seen[1]
    if inner[1] is not None:
        assert seen[0] == inner


def test_switches_are_each_thread_s_own() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        assert in_thread(lambda: casts.local.switches.on)
    off = make(on=False)
    with off.switched(True, forced_off=False):
        assert off.local.switches.on
        assert not in_thread(lambda: off.local.switches.on)
