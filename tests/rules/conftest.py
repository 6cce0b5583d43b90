"""Fixtures for lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autoamp.rules import loader


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start from, which is the current one too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def no_package_lists(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out the lists of installed packages, but for the tests of those."""
    with pytest.MonkeyPatch.context() as patched:
        if request.module.__name__.rpartition(".")[2] != "test_package_lists":
            patched.setattr(loader, "find_package_lists", lambda: ())
        yield
