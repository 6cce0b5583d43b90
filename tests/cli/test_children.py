"""What child processes tell of their runs: whole reports, once, of those that did something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoamp.cli.children import FOLDER_VARIABLE, Children, ReportWriter, parents_folder
from tests.cli.test_report import REPORT


def test_folders_of_parents_within_parents_are_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    inner = Children()
    assert os.environ[FOLDER_VARIABLE] == str(inner.folder)
    (inner.folder / "broken.json").write_text("{", encoding="utf-8")
    assert inner.reports() == []
    assert parents_folder() == tmp_path


def test_a_parent_that_is_gone_is_told_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert parents_folder() is None
    ReportWriter(tmp_path / "gone", lambda: REPORT).write()
    assert not list(tmp_path.iterdir())
