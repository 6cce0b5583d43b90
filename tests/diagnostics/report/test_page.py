"""Pages and JSON as files; names cannot inject."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autoamp.diagnostics import load_report, report_page, write_report
from autoamp.errors import UsageError
from tests.diagnostics.report.runs import EVIL, many, train

needs_tools = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="the extra report is absent")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    handle, _ = train(4, faults=(3,))
    yield handle.report()
    handle.deactivate()


class Scripts(HTMLParser):
    """Notes the scripts of a page, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag == "script":
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem == "script":
            self.texts[-1] += data


@needs_tools
def test_names_cannot_inject(document: dict[str, Any]) -> None:
    page = report_page([many(document, rows=3)])
    assert EVIL not in page
    scripts = Scripts()
    scripts.feed(page)
    assert len(scripts.texts) == 2
    assert scripts.loads == []
    assert json.loads(scripts.texts[0])[0]["trace"]["rows"][0]["op"] == EVIL


@needs_tools
def test_a_page_is_small(document: dict[str, Any]) -> None:
    assert len(report_page([document])) < 1_000_000


@needs_tools
def test_two_runs_stand_side_by_side(document: dict[str, Any]) -> None:
    page = report_page([document, document], ["a.json", "b.json"])
    assert 'id="comparison"' in page
    assert len(re.findall(r'class="pane" data-run="1"', page)) == 8
    assert 'id="comparison"' not in report_page([document])


def test_json_is_read_back(document: dict[str, Any], tmp_path: Path) -> None:
    write_report(tmp_path / "run.json", [document])
    assert load_report(tmp_path / "run.json") == document


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "cannot be read"), ("[]", "no report of a run"), ('{"kind": "autoamp.run", "schema": 0}', "schema 0")],
)
def test_what_is_no_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_report(path)


def test_without_the_extra_the_remedy_is_named(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'autoamp\[report\]'"):
        write_report(tmp_path / "report.html", [document])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error(document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(tmp_path / "none" / "run.json", [document])
