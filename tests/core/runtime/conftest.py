"""Fixtures of this folder: a handle, and a small training."""

from __future__ import annotations

import pytest

from autoamp.core import Handle
from tests.core.runtime.shared import Training, init


@pytest.fixture
def handle() -> Handle:
    return init()


@pytest.fixture
def training() -> Training:
    return Training()
