"""What tests of steps count: passes over gradients, and reads that wait for a device."""

from __future__ import annotations

import importlib

import pytest

from autoamp.scaling import verdict


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many found_inf tensors each reading took. A reading is one synchronisation on a device."""
    calls: list[int] = []
    read = verdict.found_any
    monkeypatch.setattr(verdict, "found_any", lambda found: calls.append(len(found)) or read(found))
    return calls


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The function of every pass over gradients."""
    calls: list[str] = []
    for file, name in (("guard", "unscale_"), ("block", "unscale_"), ("block", "scale_")):
        module = importlib.import_module(f"autoamp.stepping.{file}")
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))
    return calls
