"""A handle whose list casts layers alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import autoamp
from tests.inference.pinned import HALF


@pytest.fixture
def handle() -> Iterator[autoamp.Handle]:
    # autoamp's casts alone, of linear and conv2d.
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists={"extends": [], "fp16": ["linear", "conv2d"]})
    yield handle
    handle.deactivate()
