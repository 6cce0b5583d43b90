"""What tests of ops that torch's autocast may cast have in common: it is as before after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autoamp.core import original_of


@pytest.fixture(autouse=True)
def torch_casts_as_before() -> Iterator[None]:
    def state() -> list[Any]:
        # Torch's own: a handle that is still active answers for itself.
        is_enabled, dtype_of = map(original_of, (torch.is_autocast_enabled, torch.get_autocast_dtype))
        return [is_enabled("cpu"), torch.is_autocast_cache_enabled(), dtype_of("cpu"), dtype_of("cuda")]

    before = state()
    yield
    assert state() == before
