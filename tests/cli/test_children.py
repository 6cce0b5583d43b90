"""Reports of child processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoamp.cli.children import FOLDER_VARIABLE, make_folder, parents_folder, take_reports, write_child_report
from tests.cli.test_report import REPORT


def test_only_whole_reports_of_children_that_did_something_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards.
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    folder = make_folder()
    assert parents_folder() == folder
    (folder / "broken.json").write_text("{", encoding="utf-8")
    write_child_report(folder, REPORT)
    write_child_report(folder, replace(REPORT, ops={}, steps=0))
    evaluation = replace(REPORT, ops={}, steps=0, own_dtypes={"float16": 3})
    write_child_report(folder, evaluation)
    found = take_reports(folder)
    assert sorted(found, key=lambda one: one.steps) == [evaluation, REPORT]
    assert not folder.exists()


def test_a_parent_that_is_gone_gets_no_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert parents_folder() is None
    write_child_report(tmp_path / "gone", REPORT)
    assert not list(tmp_path.iterdir())
