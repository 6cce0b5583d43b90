"""What child processes tell of their runs: whole reports, once, of those that did something."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from autoamp.cli.children import FOLDER_VARIABLE, Children, Teller, parents_folder
from tests.cli.test_report import REPORT


def test_a_child_tells_once_and_the_folder_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert parents_folder() is None
    children = Children()
    assert parents_folder() == children.folder
    teller = Teller(children.folder, lambda: REPORT)
    teller.tell()
    teller.tell()
    assert children.reports() == [REPORT]
    assert not children.folder.exists()
    assert parents_folder() is None


def test_who_did_nothing_tells_nothing_but_of_its_own_children(tmp_path: Path) -> None:
    idle = replace(REPORT, ops={}, steps=0)
    Teller(tmp_path, lambda: idle).tell()
    assert not list(tmp_path.iterdir())
    Teller(tmp_path, lambda: replace(idle, children=2)).tell()
    assert [json.loads(file.read_text(encoding="utf-8"))["children"] for file in tmp_path.iterdir()] == [2]


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
    Teller(tmp_path / "gone", lambda: REPORT).tell()
    assert not list(tmp_path.iterdir())
