"""Entries for lists, and their TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from autoamp.diagnostics import Hint
from autoamp.diagnostics.report.remedies import as_toml, contradicts, remedies
from autoamp.rules import load_table
from tests.diagnostics.report.runs import EVIL

HINT = {"kind": "casts more than it computes", "where": "gelu in 1", "figure": "9 elements", "bytes": 1}


def overflows(*names: str) -> list[dict[str, Any]]:
    group = {
        "count": 2,
        "sentence": "mul\nmade inf",
        "overflow": {"op": "mul", "fp32_names": list(names), "location": "net.py:7"},
    }
    search = {"count": 2, "sentence": "normal", "overflow": {"op": "linear", "fp32_names": []}}
    return [search, group]


def test_unsafe_ops_come_first_and_the_scale_search_asks_for_nothing() -> None:
    hints = [{**HINT, "remedy": "do not cast it: none = ['gelu']; or"}, {**HINT, "remedy": "none = ['mul']"}]
    table = load_table("default")
    found = remedies(overflows("mul"), hints, table)
    assert [(one["policy"], one["op"]) for one in found] == [("fp32", "mul"), ("none", "gelu")]
    assert found[0]["evidence"] == "2 skips; first: mul made inf"
    assert found[0]["now"].startswith("none by lists/default.toml:")


def test_lines_are_a_list_file(tmp_path: Path) -> None:
    table = load_table("default")
    path = tmp_path / "autoamp.toml"
    entries = remedies(overflows("mul"), [], table)
    path.write_text("\n".join(as_toml(entries)), encoding="utf-8")
    found = load_table([str(path)])
    rule = found.policy_of("mul")
    assert rule is not None
    assert rule.policy.value == "fp32"


def test_each_name_that_was_called_has_an_entry() -> None:
    found = remedies(overflows("__mul__", "__rmul__"), [], load_table("default"))
    assert [one["op"] for one in found] == ["__mul__", "__rmul__"]


@pytest.mark.parametrize(
    ("where", "remedy", "is_one"),
    [
        ("add in 1 (net.py:7)", "list 'add' as fp16 or promote", True),
        ("mul in 2 (net.py:9)", "list 'mul' as fp16 or promote", True),
        ("mean in 2 (net.py:8)", "list it as fp16 or none", False),
        ("add in 2 (net.py:9)", "list 'add' as fp16 or promote", False),
    ],
)
def test_no_hint_contradicts_an_entry(where: str, remedy: str, is_one: bool) -> None:
    assert contradicts(Hint("fp32 island", where, "", remedy, 1), overflows("mul")) is is_one


def test_names_cannot_leave_their_line() -> None:
    entry = {
        "policy": "fp32",
        "op": f'a"\n{EVIL}',
        "evidence": f"one\r\ntwo {EVIL}\x00\x7f",
        "now": "",
    }
    assert tomllib.loads("\n".join(as_toml([entry]))) == {"schema": 1, "fp32": [entry["op"]]}


def test_nothing_gives_no_file() -> None:
    assert as_toml([]) == []
