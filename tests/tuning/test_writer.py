"""What is written is a list file that says what was found."""

from __future__ import annotations

import tomllib
from pathlib import Path

from autoamp.rules import CastPolicy, load_table
from autoamp.tuning import Proposal, list_text

PROPOSALS = (
    Proposal("softmax", "fp16", "profitable", "40 us, 100 us"),
    Proposal("mul", "fp32", "unsafe", "5 overflow\nat 'net.py':7 \x00 # \u20ac"),
    Proposal("add", "fp32", "unsafe", "6 overflow"),
    Proposal("conv2d", "fp32", "unprofitable", "does not pay"),
    Proposal("net.Head", "fp32", "unsafe", "linear is unsafe", of_module=True),
)


def test_entries_have_their_policies_and_reasons(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = list_text(PROPOSALS, ["bf16"], ["Written by autoamp tune.", "", "two\nlines"])
    path.write_text(text, encoding="utf-8")
    assert tomllib.loads(text) == {
        "schema": 1,
        "extends": ["bf16"],
        "fp16": ["softmax"],
        "fp32": ["add", "conv2d", "mul"],
        "modules": {"net.Head": "fp32"},
    }
    assert '"softmax",  # profitable: 40 us, 100 us' in text
    assert "# unsafe: 5 overflow at 'net.py':7   # \u20ac" in text
    table = load_table(str(path), start=tmp_path, environ={})
    rule = table.policy_of("mul")
    assert rule is not None
    assert (rule.policy, rule.origin.path) == (CastPolicy.FP32, str(path))


def test_without_entries_it_is_a_list_still() -> None:
    assert tomllib.loads(list_text((), comments=["nothing pays"])) == {"schema": 1}
