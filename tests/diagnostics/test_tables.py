"""Tables, CSV, and the rows that are shown in them."""

from __future__ import annotations

from autoamp.diagnostics import CallSite, Hint, Row
from autoamp.diagnostics.rows import COLUMNS
from autoamp.diagnostics.tables import as_csv, as_table


def test_a_table_shows_text_as_it_is_and_whole() -> None:
    text = as_table("Ops", ("op", "calls so far"), [("linear", "12"), ("[bold]odd[/bold]", "3"), ("x" * 300, "4")], 1)
    assert "[bold]odd[/bold]" in text
    assert text.count("x") == 300
    assert [line.split()[-2] for line in text.splitlines() if "linear" in line or "odd" in line] == ["12", "3"]
    assert as_table("Ops", ("op",), []) == "Ops: nothing\n"


def test_csv_quotes_and_joins() -> None:
    assert as_csv([{"a": 'x,"y"', "b": {"k": 1, "l": 2}, "c": 0}], ("a", "b")) == 'a,b\n"x,""y""",k=1 l=2\n'


def test_a_row_and_a_hint_as_plain_values_and_in_a_sentence() -> None:
    row = Row("torch.exp", "fp32", "exp", "lists=", CallSite("a.b", "Exp", "Model", "/nowhere/x.py", 3))
    found = row.to_dict()
    assert tuple(found) == COLUMNS
    assert (found["module"], found["module_class"], found["location"]) == ("a.b", "Exp", "/nowhere/x.py:3")
    assert row.label == "exp in a.b (/nowhere/x.py:3)"
    outside = Row("torch.exp", "fp32", None, None, CallSite(None, None, None, None, None))
    assert outside.label == "exp (no Python frame)"
    hint = Hint("fp32 island", "exp", "3 results", "list it", 8)
    assert set(hint.to_dict()) == {"kind", "where", "figure", "remedy", "bytes"}
    assert str(hint) == "fp32 island: exp: 3 results; list it"
