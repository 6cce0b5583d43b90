"""Entries for lists, and their TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autoamp.diagnostics.report.document import remedies
from autoamp.diagnostics.report.page import as_toml
from autoamp.rules import load_table
from tests.diagnostics.report.runs import EVIL


def overflows(*names: str) -> list[dict[str, Any]]:
    group = {
        "count": 2,
        "sentence": "mul\nmade inf",
        "overflow": {"op": "mul", "fp32_names": list(names), "fp32_module": None, "location": "net.py:7"},
    }
    search = {"count": 2, "sentence": "normal", "overflow": {"op": "linear", "fp32_names": [], "fp32_module": None}}
    return [search, group, {"count": 1, "sentence": "not explained", "overflow": None}]


def test_each_name_that_was_called_has_an_entry_in_a_list_file(tmp_path: Path) -> None:
    path = tmp_path / "autoamp.toml"
    entries = remedies(overflows("__mul__", "__rmul__"), load_table("default"))
    assert [(one["policy"], one["op"]) for one in entries] == [("fp32", "__mul__"), ("fp32", "__rmul__")]
    assert entries[0]["evidence"] == "2 skips; first: mul made inf"
    assert entries[0]["now"].startswith("none by lists/default.toml:")
    path.write_text("\n".join(as_toml(entries)), encoding="utf-8")
    rule = load_table([str(path)]).policy_of("__rmul__")
    assert rule is not None
    assert rule.policy.value == "fp32"
    assert as_toml([]) == []


def test_names_cannot_leave_their_line() -> None:
    entry = {"policy": "fp32", "op": f'a"\n{EVIL}', "evidence": f"one\r\ntwo {EVIL}\x00\x7f"}
    assert tomllib.loads("\n".join(as_toml([entry]))) == {"schema": 1, "fp32": [entry["op"]]}


def test_a_class_of_modules_has_an_entry_in_a_list_file(tmp_path: Path) -> None:
    path = tmp_path / "autoamp.toml"
    overflow = {"op": "mul", "fp32_names": [], "fp32_module": "torch.nn.GELU", "location": "net.py:7"}
    group = {"count": 1, "sentence": "mul made inf", "overflow": overflow}
    path.write_text("\n".join(as_toml(remedies([*overflows("mul"), group], load_table("default")))), encoding="utf-8")
    table = load_table([str(path)])
    assert [(rule.pattern, rule.precision.value) for rule in table.modules] == [("torch.nn.GELU", "fp32")]
