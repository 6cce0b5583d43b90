"""Counts where autoamp waits for a device: each time that it takes a Python value out of a tensor."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

# It reads what has arrived already.
_NO_WAIT = "autoamp.core.loss_scale"


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of elements of each reading from now on."""
    reads: list[int] = []
    for name in ("item", "tolist"):
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, original: Any = original) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("autoamp.") and caller != _NO_WAIT:
                reads.append(tensor.numel())
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return reads
