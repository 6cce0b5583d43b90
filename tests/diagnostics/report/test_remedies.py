"""Entries for lists, and their TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autoamp.diagnostics.report.remedies import as_toml, remedies
from autoamp.rules import load_table
from tests.diagnostics.report.runs import EVIL

HINT = {"kind": "casts more than it computes", "where": "gelu in 1", "figure": "9 elements", "bytes": 1}


def skips(op: str) -> dict[str, Any]:
    group = {
        "kind": "half_precision_op",
        "count": 2,
        "sentence": "mul\nmade inf",
        "overflow": {"op": op, "fp32_names": [op]},
    }
    search = {"kind": "scale_search", "count": 2, "sentence": "normal", "overflow": {"op": "linear", "fp32_names": []}}
    return {"groups": [search, group]}


def test_unsafe_ops_come_first_and_the_scale_search_asks_for_nothing() -> None:
    hints = [{**HINT, "remedy": "leave it alone with none = ['gelu'], or"}, {**HINT, "remedy": "none = ['mul']"}]
    table = load_table("default")
    found = remedies(skips("mul"), hints, table)
    assert [(one["policy"], one["op"]) for one in found] == [("fp32", "mul"), ("none", "gelu")]
    assert found[0]["evidence"] == "2 skips; first: mul made inf"
    assert found[0]["now"].startswith("none by lists/default.toml:")


def test_lines_are_a_list_file(tmp_path: Path) -> None:
    table = load_table("default")
    path = tmp_path / "autoamp.toml"
    path.write_text("\n".join(as_toml(remedies(skips("mul"), [], table))), encoding="utf-8")
    rule = load_table([str(path)]).policy_of("mul")
    assert rule is not None
    assert rule.policy.value == "fp32"


def test_each_name_that_was_called_has_an_entry() -> None:
    found = skips("mul")
    found["groups"][1]["overflow"]["fp32_names"] = ["__mul__", "__rmul__"]
    assert [one["op"] for one in remedies(found, [], load_table("default"))] == ["__mul__", "__rmul__"]


def test_names_cannot_leave_their_line() -> None:
    entry = {"policy": "fp32", "op": f'a"\n{EVIL}', "evidence": f"one\r\ntwo {EVIL}\x00\x7f", "now": ""}
    assert tomllib.loads("\n".join(as_toml([entry]))) == {"schema": 1, "fp32": [entry["op"]]}


def test_nothing_gives_no_file() -> None:
    assert as_toml([]) == []
