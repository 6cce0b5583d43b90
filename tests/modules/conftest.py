"""A handle whose list casts few ops."""

from __future__ import annotations

import pytest

import autoamp
from tests.modules.watches import start


@pytest.fixture
def handle() -> autoamp.Handle:
    return start()
