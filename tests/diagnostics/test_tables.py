"""Tables with and without rich, and CSV."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from autoamp.diagnostics import as_csv, as_table

ROWS = [("linear", "12"), ("[bold]odd[/bold]", "3")]


def test_table_of_rich_shows_text_as_it_is() -> None:
    text = as_table("Ops", ("op", "calls"), ROWS, 1)
    assert "[bold]odd[/bold]" in text
    assert "linear" in text


def test_without_rich_a_plain_table(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    assert as_table("Ops", ("op", "calls"), ROWS, 1).splitlines() == [
        "Ops",
        "op                calls",
        "linear               12",
        "[bold]odd[/bold]      3",
    ]


def test_no_rows() -> None:
    assert as_table("Ops", ("op",), []) == "Ops: nothing\n"


def test_csv_quotes_and_joins() -> None:
    assert as_csv([{"a": 'x,"y"', "b": {"k": 1, "l": 2}, "c": 0}], ("a", "b")) == 'a,b\n"x,""y""",k=1 l=2\n'
