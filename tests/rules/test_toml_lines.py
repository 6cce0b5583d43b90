"""The lines of keys, tables and array items; `test_parser.py` compares them with random lists too."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from autoamp.rules.toml_lines import TomlLines


def test_keys_below_an_array_of_tables_have_its_name() -> None:
    keys = TomlLines("[[a]]\nb = 1\n[c]\nd = 2").keys
    assert keys == {("a",): 1, ("a", "b"): 2, ("c",): 3, ("c", "d"): 4}


def test_lines_after_values_that_mislead_a_reader() -> None:
    assert TomlLines("x = [{a = 1},\n{b = 2}]\ny = 3").keys == {("x",): 1, ("x", "a"): 1, ("x", "b"): 2, ("y",): 3}
    assert TomlLines("x = [{a = [['s']]}]").items == {("x", "a"): [1]}
    assert TomlLines("x = {a = {b = 1}}").keys == {("x",): 1, ("x", "a"): 1, ("x", "a", "b"): 1}
    assert TomlLines("x = 1.5\ny = 2001-02-03 04:05:06.7\nz = 3").keys == {("x",): 1, ("y",): 2, ("z",): 3}
    text = 'x = """["""""\ny = \'\'\'[\'\'\'\'\nz = "\\"["\nw = 1'
    assert tomllib.loads(text) == {"x": '[""', "y": "['", "z": '"[', "w": 1}
    assert TomlLines(text).keys == {("x",): 1, ("y",): 2, ("z",): 3, ("w",): 4}
    assert TomlLines('x = ["""["""", "]",\n"["]').items == {("x",): [1, 1, 2]}


toml_values = st.recursive(
    st.sampled_from(["1", "1.5e3", "true", "1979-05-27T07:32:00Z", "'s'", '"a]b"', '"""m\n"q" #\n"""', "'''\n]'''"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ # [\n" + ",\n".join(items) + "\n]")
        | st.lists(inner, max_size=2).map(
            lambda items: "{" + ", ".join(f"k{i} = {v}" for i, v in enumerate(items)) + "}"
        )
    ),
    max_leaves=8,
)


@given(st.lists(toml_values, max_size=6))
def test_lines_of_keys_between_values_of_every_kind(items: list[str]) -> None:
    text, expected = "", {}
    for number, value in enumerate(items):
        text += f"# c = [\n[t.'x y'.n{number}]\n"
        expected["t", "x y", f"n{number}"] = text.count("\n")
        text += f'a . "b" = {value} # "\n'
        expected["t", "x y", f"n{number}", "a", "b"] = text.count("\n") - value.count("\n")
    tomllib.loads(text)
    found = TomlLines(text)
    assert {path: found.of(path) for path in expected} == expected
