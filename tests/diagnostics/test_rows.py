"""Rows and hints as plain values and as sentences."""

from __future__ import annotations

from autoamp.diagnostics import CallSite, Hint, Row
from autoamp.diagnostics.rows import COLUMNS


def test_a_row_as_plain_values() -> None:
    row = Row("torch.exp", "fp32", "exp", "lists=", CallSite("a.b", "Exp", "Model", "/nowhere/x.py", 3))
    found = row.to_dict()
    assert tuple(found) == COLUMNS
    assert (found["module"], found["module_class"], found["location"]) == ("a.b", "Exp", "/nowhere/x.py:3")
    assert row.label == "exp in a.b (/nowhere/x.py:3)"


def test_labels_outside_of_modules() -> None:
    assert Row("torch.exp", "fp32", None, None, CallSite(None, None, None, None, None)).label == "exp (no Python frame)"


def test_a_hint_as_values_and_as_a_sentence() -> None:
    hint = Hint("fp32 island", "exp", "3 results", "list it", 8)
    assert hint.to_dict() == {
        "kind": "fp32 island", "where": "exp", "figure": "3 results", "remedy": "list it", "bytes": 8,
    }  # fmt: skip
    assert str(hint) == "fp32 island: exp: 3 results; list it"
