"""The handle of ``init(enabled=False)`` has all that a handle has."""

from __future__ import annotations

import inspect

import autoamp
from autoamp.runtime.handle import Handle
from autoamp.runtime.no_op import NoOpHandle

# What init and initialize call on a handle of their own making.
INTERNAL = {
    "inherit",
    "install_anew",
    "let_go",
    "steps_halves",
    "activate",
    "suspend",
    "patch",
    "set_up_model",
    "keep_masters",
    "step_halves",
}


def test_the_surface_is_that_of_a_handle() -> None:
    public = {name for name in vars(Handle) if not name.startswith("_")} - INTERNAL
    missing = {name for name in public if not hasattr(NoOpHandle, name)}
    assert not missing
    for name in public:
        ours, theirs = getattr(NoOpHandle, name), getattr(Handle, name)
        if inspect.isfunction(ours) and inspect.isfunction(theirs):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_init_disabled_returns_it() -> None:
    handle = autoamp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert not handle.is_active()
    assert not handle.auto_scale().active
    assert handle.deactivate() == ()
