"""A handle whose list casts layers alone."""

from __future__ import annotations

import pytest

import autoamp
from tests.inference.pinned import HALF


@pytest.fixture
def handle() -> autoamp.Handle:
    lists = {"extends": [], "fp16": ["linear", "conv2d", "conv_transpose2d", "lstm"]}
    return autoamp.init(device_type="cpu", dtype=HALF, lists=lists)
