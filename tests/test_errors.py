"""The exception family: one base, and the built-in kinds that callers catch."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp import errors

# What callers of Python, torch and Apex catch.
KINDS: dict[type[errors.AutoampError], type[Exception]] = {
    errors.ListFileError: ValueError,
    errors.PatchError: RuntimeError,
    errors.TargetError: ValueError,
    errors.LossScaleError: ValueError,
    errors.BannedFunctionError: NotImplementedError,
    errors.UsageError: RuntimeError,
    errors.NonFiniteGradientsError: RuntimeError,
    errors.CheckpointError: ValueError,
    errors.TapeError: ValueError,
}


def test_every_error_is_an_autoamp_error_and_of_the_built_in_kind_that_callers_expect() -> None:
    found = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AutoampError)}
    assert found - {errors.AutoampError} == KINDS.keys()
    assert [kind for kind, expected in KINDS.items() if not issubclass(kind, expected)] == []


def test_a_list_file_error_says_where() -> None:
    error = errors.ListFileError("unknown op 'softmx'", "project.toml", 4)
    assert str(error) == "project.toml:4: unknown op 'softmx'"
    assert (error.path, error.line) == ("project.toml", 4)
    assert str(errors.ListFileError("no such set", "lists=")) == "lists=: no such set"


@pytest.mark.parametrize(
    ("value", "named"), [(None, "None"), (3, "an int"), ("3", "a str"), (OrderedDict(), "an OrderedDict")]
)
def test_an_error_names_what_was_given_with_its_article(value: Any, named: str) -> None:
    with pytest.raises(autoamp.UsageError, match=f"takes a torch.nn.Module or a list of them, not {named}$"):
        autoamp.initialize([value])


# -- warnings --


def test_a_warning_points_at_the_users_line_through_modules_of_torch() -> None:
    class Warns(torch.nn.Module):
        pass

    # As a method of ours, called by a module of torch.
    Warns.forward = _compiled("autoamp.anywhere", "def f(self, x): warn_user('look here'); return x")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="look here") as caught:
        torch.nn.Sequential(Warns())(torch.ones(1))
    assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_of_an_import_points_at_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("def there(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    lists = {"extends": [], "fp16": ["imported_late.absent"], "fp32": []}
    handle = autoamp.init(dtype=torch.bfloat16, device_type="cpu", lists=lists)
    try:
        with pytest.warns(UserWarning, match="a rule has no effect") as caught:
            import imported_late  # type: ignore[import-not-found]  # noqa: F401
    finally:
        handle.deactivate()
        sys.modules.pop("imported_late", None)
    assert [warning.filename for warning in caught] == [__file__]


def _compiled(module: str, source: str) -> Any:
    names: dict[str, Any] = {"__name__": module, "warn_user": errors.warn_user}
    exec(source, names)
    return names["f"]


@pytest.mark.parametrize("line", [4, None])
def test_a_list_file_error_comes_back_from_a_worker(line: int | None) -> None:
    error = errors.ListFileError("unknown op 'softmx'", "project.toml", line)
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.path, back.line) == (str(error), error.path, error.line)
