"""What tests of diagnostics share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoamp


@pytest.fixture
def handle() -> Any:
    """Cast to fp16 on the CPU, at a loss scale of 1024."""
    return autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=1024.0)


@pytest.fixture
def short_lists() -> Any:
    """Cast to fp16 on the CPU, at a loss scale of 1024, by lists of five ops."""
    lists = {"extends": [], "fp16": ["linear"], "fp32": ["softmax", "exp"], "promote": ["cat"], "none": []}
    return autoamp.init(device_type="cpu", dtype=torch.float16, lists=lists, loss_scale=1024.0)
