"""Events: who hears of handles, in which order, and what a failing listener leaves behind."""

from __future__ import annotations

import pytest
import torch

import autoamp
from autoamp.runtime import Handle, activated, suspended


def test_handles_are_told_of_as_they_come_and_go() -> None:
    heard: list[tuple[str, Handle | None]] = []

    def note_activated(handle: Handle) -> None:
        assert handle is autoamp.current_handle()
        heard.append(("activated", handle))

    def note_suspended() -> None:
        # The patches are in place still.
        heard.append(("suspended", autoamp.current_handle()))

    activated.append(note_activated)
    suspended.append(note_suspended)
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
        activated.remove(note_activated)
        suspended.remove(note_suspended)
    expected = [(event, handle) for handle in (one, inner, one, last) for event in ("activated", "suspended")]
    assert heard == expected


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
