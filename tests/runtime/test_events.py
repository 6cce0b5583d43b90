"""Events: who hears of handles, in which order, and what a failing listener leaves behind."""

from __future__ import annotations

import pytest
import torch

import autoamp
from autoamp.runtime.events import Event, activated, suspended
from autoamp.runtime.handle import Handle


def test_listeners_are_told_in_their_order_until_they_are_taken_back() -> None:
    event, heard = Event(), []
    forget = event.listen(lambda what: heard.append(("first", what)))
    event.listen(lambda what: heard.append(("second", what)))
    event.tell(1)
    forget()
    event.tell(2)
    assert heard == [("first", 1), ("second", 1), ("second", 2)]


def test_a_listener_may_end_itself() -> None:
    event, heard = Event(), []

    def once(what: int) -> None:
        heard.append(what)
        forget()

    forget = event.listen(once)
    event.listen(heard.append)
    event.tell(1)
    event.tell(2)
    assert heard == [1, 1, 2]


def test_handles_are_told_of_as_they_come_and_go() -> None:
    heard: list[tuple[str, Handle | None, bool]] = []

    def note(what: str) -> None:
        events = {"activated": activated, "suspended": suspended}
        # When it is told of, a handle's patches are in place, and it is the current one.
        forgets.append(
            events[what].listen(
                lambda handle: heard.append((what, handle, handle.is_active() and autoamp.current_handle() is handle))
            )
        )

    forgets = []
    note("activated")
    note("suspended")
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
        for forget in forgets:
            forget()
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

    def refuse(handle: Handle) -> None:
        if handle is not one:
            raise ValueError("not this one")

    forget = activated.listen(refuse)
    try:
        with pytest.raises(ValueError, match="not this one"):
            autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    finally:
        forget()
    assert autoamp.current_handle() is one
    assert one.is_active()
