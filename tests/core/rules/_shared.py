"""Lists as tests write and read them, and random valid ones."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from autoamp.core import CastTable, load_table, located
from autoamp.errors import ListFileError

POLICY_KEYS = ("fp16", "fp32", "promote", "none")


def load(lists: object = None, environ: Mapping[str, str] | None = None, **options: Any) -> CastTable:
    return load_table(lists, environ=environ or {}, **options)


def check_refused(lists: object, path: object, line: int | None, words: list[str], **options: Any) -> None:
    """Check that a list is refused with an error that names this file and line, and has these words."""
    with pytest.raises(ListFileError) as caught:
        load(lists, **options)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    for word in words:
        assert word in str(caught.value)


def policies(table: CastTable) -> dict[str, str]:
    return {rule.target: rule.policy.value for rule in table.rules}


def write(path: Path, text: str, *, schema: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("schema = 1\n" * schema + text, encoding="utf-8")
    return path


@functools.cache
def shipped_file(name: str) -> Path:
    rule = load_table("default", environ={}).rules[0]
    return Path(located(rule.origin).rpartition(":")[0]).with_name(name)


def shipped_data(name: str) -> dict[str, Any]:
    return tomllib.loads(shipped_file(f"{name}.toml").read_text(encoding="utf-8"))


identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)

targets = st.lists(identifiers, min_size=1, max_size=3).map(".".join)

remarks = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)

patterns = st.from_regex(r"[A-Za-z_*][A-Za-z0-9_.*]{0,8}", fullmatch=True)


@st.composite
def list_sets(draw: st.DrawFn) -> dict[str, Any]:
    """The content of a valid list set that extends nothing."""
    names = draw(st.lists(targets, unique=True, max_size=12))
    keys = [draw(st.sampled_from([*POLICY_KEYS, "banned"])) for _ in names]
    data: dict[str, Any] = {"schema": 1, "extends": []}
    for key in POLICY_KEYS:
        data[key] = [name for name, at in zip(names, keys, strict=True) if at == key]
    data["banned"] = {name: draw(remarks) for name, at in zip(names, keys, strict=True) if at == "banned"}
    data["modules"] = draw(st.dictionaries(patterns, st.sampled_from(["fp16", "fp32", "none"]), max_size=4))
    return data
