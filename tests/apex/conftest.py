"""The alias, installed for a test and taken back after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from autoamp.apex import install_as_apex, uninstall


@pytest.fixture
def apex() -> Iterator[Any]:
    """Install the alias for tensors of the CPU, import `apex`, and take both back."""
    install_as_apex(device_type="cpu")
    import apex

    yield apex
    uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]
