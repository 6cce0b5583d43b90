"""A handle whose list casts few ops, and data parallel on the CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

import autoamp
from tests.core.modules.watches import start


@pytest.fixture
def handle() -> autoamp.Handle:
    return start()


@pytest.fixture
def parallel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What parallel_apply asks of an accelerator, answered by the CPU."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
