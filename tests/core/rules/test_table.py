"""Limits of versions, and tables laid over each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from autoamp.core import CastTable, admits_version, half_model_table
from autoamp.errors import ListFileError
from tests.core.rules._shared import list_sets, load, policies


@pytest.mark.parametrize(
    ("limits", "version", "expected"),
    [
        ("", "2.13.0", True),
        (">=2.13", "2.13.0+cpu", True),
        (">=2.13", "2.9.1", False),
        (">=2.13", "3.0.0", True),
        ("<2.13", "2.12.1", True),
        ("<2.13", "2.13.0a0+git1", False),
        (">=2.12,<2.14", "2.13.0", True),
        (">=2.12, <2.14", "2.14.0", False),
        (">=2.12,<2.14", "2.11.0", False),
    ],
)
def test_admits(limits: str, version: str, expected: bool) -> None:
    assert admits_version(limits, version) is expected


@pytest.mark.parametrize("limits", ["", "2.13", "=2.13", ">=2", ">=2.13 <2.14", ">2.13", ">=2.13.1", ">=2.13,"])
def test_a_text_that_limits_no_version_is_refused(limits: str) -> None:
    with pytest.raises(ListFileError, match="under versions"):
        load({"fp32": ["exp"], "versions": {"exp": limits}})


def test_what_handles_share_is_not_written_to() -> None:
    # The table of a shipped set is checked once, and all handles have its rules.
    table = load({"modules": {"head.*": "fp32"}})
    for part in (table, table.rules[0], table.modules[0], table.rules[0].origin):
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)


def test_rules_of_shipped_sets_mean_nothing_inside_half_models() -> None:
    default = load("default")
    # Also in a table that names none of its sources.
    for table in (default, CastTable(default.rules)):
        own = [rule for rule in half_model_table(table).rules if rule.origin.path != "lists/o2.toml"]
        assert own == []


def test_a_version_needs_two_numbers() -> None:
    with pytest.raises(ValueError, match="version='main' does not begin with two numbers"):
        admits_version(">=2.13", "main")


@given(list_sets(), list_sets(), list_sets())
def test_overlays_are_associative_idempotent_and_the_last_one_wins(
    one: dict[str, Any], two: dict[str, Any], three: dict[str, Any]
) -> None:
    a, b, c = load(one), load(two), load(three)
    merged = a.overlaid(b).overlaid(c)
    assert merged == a.overlaid(b.overlaid(c))
    assert a.overlaid(a) == a
    assert merged.overlaid(c) == merged
    assert a.overlaid(CastTable()) == CastTable().overlaid(a) == a
    assert merged == load([one, two, three])
    assert merged.policy_of("no.such.name") is None
    assert policies(merged) == policies(a) | policies(b) | policies(c)
    assert len(merged.rules) == len(policies(merged))
    assert merged.rules[len(merged.rules) - len(c.rules) :] == c.rules
    for rule in merged.rules:
        assert merged.policy_of(rule.target) is rule
    expected = {rule.pattern: rule.precision for table in (a, b, c) for rule in table.modules}
    assert {rule.pattern: rule.precision for rule in merged.modules} == expected
