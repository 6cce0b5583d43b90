"""The sweep is collected only where it is asked for: its inputs come from torch's test helpers, which load slowly."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out but for a run that asks for the mark."""
    asked = config.getoption("markexpr", "")
    return None if "sweep" in asked and "not sweep" not in asked else True
