"""A handle that casts nothing, and its automatic scaling."""

from __future__ import annotations

import pytest

import autoamp
from autoamp.core import AutoScale
from tests.core.auto_scaling.programs import NO_CASTS


@pytest.fixture
def handle() -> autoamp.Handle:
    return autoamp.init(**NO_CASTS)


@pytest.fixture
def scaling(handle: autoamp.Handle) -> AutoScale:
    return handle.auto_scale()
