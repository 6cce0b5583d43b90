"""What tests of ops that torch's autocast may cast have in common: it is as before after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_casts_as_before() -> Iterator[None]:
    def state() -> list[Any]:
        return [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu")]

    before = state()
    yield
    assert state() == before
