"""The exception family: one base, and the built-in kinds that callers catch."""

from __future__ import annotations

import pytest

from autoamp import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Error")])
def test_every_error_is_an_autoamp_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.AutoampError)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ListFileError", ValueError),
        ("PatchError", RuntimeError),
        ("BannedFunctionError", NotImplementedError),
        ("UsageError", RuntimeError),
        ("NonFiniteGradientsError", RuntimeError),
        ("CheckpointError", ValueError),
    ],
)
def test_every_error_is_of_the_built_in_kind_that_callers_expect(name: str, kind: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), kind)


def test_a_list_file_error_says_where() -> None:
    error = errors.ListFileError("unknown op 'softmx'", "project.toml", 4)
    assert str(error) == "project.toml:4: unknown op 'softmx'"
    assert (error.path, error.line) == ("project.toml", 4)
    assert str(errors.ListFileError("no such set", "lists=")) == "lists=: no such set"
