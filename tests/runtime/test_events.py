"""Events: who hears of handles, in which order, and what a failing listener leaves behind."""

from __future__ import annotations

import functools

import pytest
import torch

import autoamp
from autoamp.runtime import Handle, activated, suspended


def test_handles_are_told_of_as_they_come_and_go() -> None:
    heard: list[tuple[str, Handle | None, bool]] = []

    def note(what: str, handle: Handle) -> None:
        # When it is told of, a handle's patches are in place, and it is the current one.
        heard.append((what, handle, handle.is_active() and autoamp.current_handle() is handle))

    events = {"activated": activated, "suspended": suspended}
    listeners = {what: functools.partial(note, what) for what in events}
    for what, event in events.items():
        event.append(listeners[what])
    try:
        one = autoamp.init(device_type="cpu", dtype=torch.float16)
        assert autoamp.init(device_type="cpu", dtype=torch.float16) is one
        with autoamp.region(device_type="cpu", dtype=torch.bfloat16) as inner:
            pass
        autoamp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        last = autoamp.current_handle()
        assert last is not None
        # Patches that are installed anew are the same handle's.
        last.count().stop()
        last.deactivate()
        last.deactivate()
    finally:
        for what, event in events.items():
            event.remove(listeners[what])
    assert heard == [
        ("activated", one, True),
        ("suspended", one, True),
        ("activated", inner, True),
        ("suspended", inner, True),
        ("activated", one, True),
        ("suspended", one, True),
        ("activated", last, True),
        ("suspended", last, True),
    ]


def test_a_listener_that_fails_leaves_the_handle_before() -> None:
    one = autoamp.init(device_type="cpu", dtype=torch.float16)
    decorated = autoamp.half_function(lambda x: x.dtype)

    def refuse(handle: Handle) -> None:
        if handle is not one:
            raise ValueError("not this one")

    activated.append(refuse)
    try:
        with pytest.raises(ValueError, match="not this one"):
            autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    finally:
        activated.remove(refuse)
    assert autoamp.current_handle() is one
    assert one.is_active()
    assert decorated(torch.ones(1)) is torch.float16
