"""The table room: limits of versions. What a table holds and how tables merge is tested with the rules."""

from __future__ import annotations

import pytest

from autoamp.rules.table import admits, is_version_limit


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
    assert is_version_limit(limits) or not limits
    assert admits(limits, version) is expected


@pytest.mark.parametrize("limits", ["", "2.13", "=2.13", ">=2", ">=2.13 <2.14", ">2.13", ">=2.13.1", ">=2.13,"])
def test_what_is_no_limit(limits: str) -> None:
    assert not is_version_limit(limits)


def test_a_version_needs_two_numbers() -> None:
    with pytest.raises(ValueError, match="version='main' does not begin with two numbers"):
        admits(">=2.13", "main")
