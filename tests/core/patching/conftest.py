"""Fixtures for patching: a module to patch, and a set of patches."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from autoamp.core import PatchSet


@pytest.fixture
def shelf() -> Iterator[types.ModuleType]:
    """A module ``shelf`` with a function ``work``, that another module can import from."""
    module = types.ModuleType("shelf")
    exec("def work(a, b=2):\n    'Adds.'\n    return a + b\n", vars(module))
    sys.modules["shelf"] = module
    yield module
    for name in [name for name in sys.modules if name.startswith("shelf")]:
        del sys.modules[name]


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    """A patch set that is restored after the test."""
    made = PatchSet()
    yield made
    made.restore()
