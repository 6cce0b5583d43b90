"""Tables, and the rows that are shown in them."""

from __future__ import annotations

from autoamp.diagnostics import CallSite, Row
from autoamp.diagnostics.tables import as_table


def test_a_table_shows_text_as_it_is_and_whole() -> None:
    text = as_table("Ops", ("op", "calls so far"), [("linear", "12"), ("[bold]odd[/bold]", "3"), ("x" * 300, "4")], 1)
    assert "[bold]odd[/bold]" in text
    assert text.count("x") == 300
    assert [line.split()[-2] for line in text.splitlines() if "linear" in line or "odd" in line] == ["12", "3"]
    assert as_table("Ops", ("op",), []) == "Ops: nothing\n"


def test_a_row_as_plain_values() -> None:
    found = Row("torch.exp", "fp32", "exp", "lists=", CallSite("a.b", "Exp", "Model", "/nowhere/x.py", 3)).to_dict()
    assert "site" not in found
    assert (found["module"], found["module_class"], found["location"]) == ("a.b", "Exp", "/nowhere/x.py:3")
    assert (found["op"], found["calls"], found["dtypes_in"]) == ("torch.exp", 0, {})
