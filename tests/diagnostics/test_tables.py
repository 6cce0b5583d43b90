"""Tables, and the rows that are shown in them."""

from __future__ import annotations

from autoamp.diagnostics import CallSite, Row
from autoamp.diagnostics.tables import as_table


def test_a_table_shows_text_as_it_is_and_whole() -> None:
    rows = [("linear", "12"), ("[bold]odd[/bold]", "3"), ("x" * 300, "4")]
    title, *lines = as_table("Ops", ("op", "calls so far"), rows, 1).splitlines()
    assert title == "Ops"
    assert [line.split() for line in lines] == [["op", "calls", "so", "far"], *map(list, rows)]
    # Numbers are aligned at the right.
    assert {len(line) for line in lines} == {300 + 2 + len("calls so far")}
    assert as_table("Ops", ("op",), []) == "Ops: nothing\n"


def test_a_row_as_plain_values() -> None:
    found = Row("torch.exp", "fp32", "exp", "lists=", CallSite("a.b", "Exp", "Model", "/nowhere/x.py", 3)).to_dict()
    assert "site" not in found
    assert (found["module"], found["module_class"], found["location"]) == ("a.b", "Exp", "/nowhere/x.py:3")
    assert (found["op"], found["calls"], found["dtypes_in"]) == ("torch.exp", 0, {})
