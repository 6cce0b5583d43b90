"""Fixtures for lists."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start from, which is the current one too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
