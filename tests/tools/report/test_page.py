"""Pages and JSON as files; names cannot inject."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoamp.errors import UsageError
from autoamp.tools import load_report, report_page, write_report
from tests.tools.report.runs import EVIL, many, train

needs_tools = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="the extra report is absent")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    handle, _ = train(4, faults=(3,))
    yield handle.report()
    handle.deactivate()


@needs_tools
def test_names_cannot_inject(document: dict[str, Any]) -> None:
    page = report_page(many(document, rows=3))
    assert EVIL not in page
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL | re.IGNORECASE)
    assert len(scripts) == page.lower().count("<script") == 2
    assert json.loads(scripts[0])["trace"]["rows"][0]["op"] == EVIL
    # It loads nothing.
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!["']?#)""", page) == []
    assert len(page) < 1_000_000


@needs_tools
def test_a_fault_is_told_once_and_the_steps_of_values_are_named(document: dict[str, Any]) -> None:
    sentence = "mul at net.py:7 made inf"
    verdict = {"sentence": f"{sentence}; 0 of 4 steps skipped", "level": "bad"}
    faults = [{"step": 0, "sentence": sentence, "overflow": {}, "remedy": "add fp32"}]
    told = {"faults": faults, "verdict": verdict, "seconds": 1.25, "peak_rss": 3 * 2**20}
    page = report_page({**document, **told})
    assert page[: page.index("<script")].count(sentence) == 1
    assert "step 0: add fp32." in page
    assert "These are the values of step 0 alone; overflows of other steps stand under the verdict." in page
    assert "The run took 1.2 s and 3 MiB of memory at its peak (RSS), recording included." in page


def test_json_is_read_back(document: dict[str, Any], tmp_path: Path) -> None:
    write_report(tmp_path / "run.json", document)
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


def test_without_jinja2_the_remedy_is_named(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install jinja2"):
        write_report(tmp_path / "report.html", document)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error(document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(tmp_path / "none" / "run.json", document)
