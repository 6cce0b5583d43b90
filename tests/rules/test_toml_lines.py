"""The lines of keys, tables and array items; `tests/test_rules.py` holds them against random files too."""

from __future__ import annotations

import pytest

from autoamp.rules.toml_lines import TomlError, parse_toml

TEXT = b"""\
# "softmax" in a comment is no entry
schema = 1
fp32 = [
    "softmax",  # [not a table]
    'log', "exp"
]
[tool.autoamp]
"none" = []
[banned]
bce = '''
two lines'''
mse = "no"
inline = {a = "x", b = ["y"]}
"""


def test_keys_tables_and_items_have_their_lines() -> None:
    data, lines = parse_toml(TEXT)
    assert data["fp32"] == ["softmax", "log", "exp"]
    assert lines.keys[("schema",)] == 2
    assert lines.keys[("fp32",)] == 3
    assert lines.items[("fp32",)] == [4, 5, 5]
    assert lines.keys[("tool", "autoamp")] == 7
    assert lines.keys[("tool", "autoamp", "none")] == 8
    assert lines.keys[("banned", "bce")] == 10
    assert lines.keys[("banned", "mse")] == 12
    assert lines.items[("banned", "inline", "b")] == [13]


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b"a = 1\nb = [\n", 3, "not valid TOML"),
        (b"a = 1\nb = =\n", 2, "not valid TOML"),
        (b"a = 1\n\xff\n", 2, "not UTF-8"),
    ],
)
def test_what_is_no_toml_says_where(raw: bytes, line: int, what: str) -> None:
    with pytest.raises(TomlError, match=what) as caught:
        parse_toml(raw)
    assert caught.value.line == line
