"""Replacements look like what they replace, and are told from it by their marks."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import pytest

from autoamp.patching import PatchSet
from autoamp.patching.patches import below_restored, imitate, mark, name_by, original_of
from tests.patching._shared import module_with, replacement_of


def test_a_replacement_looks_like_its_original(shelf: types.ModuleType) -> None:
    ours = replacement_of(shelf.work)
    assert ours.__name__ == "work"
    assert ours.__doc__ == "Adds."
    assert inspect.signature(ours) == inspect.signature(shelf.work)
    assert original_of(ours) is shelf.work
    assert original_of(replacement_of(ours)) is shelf.work


def test_a_replacement_of_a_builtin_has_the_names_that_it_is_given(shelf: types.ModuleType) -> None:
    def names(original: Any, *given: str) -> tuple[str, str]:
        ours = imitate(lambda *args: original(*args), original, *given)
        return ours.__module__, ours.__qualname__

    assert names(len) == ("builtins", "len")
    assert names(len, "shelf", "Shelf.len") == ("shelf", "Shelf.len")
    # What is written in Python is pickled by the names that it has.
    assert names(shelf.work, "elsewhere", "other") == (shelf.work.__module__, shelf.work.__qualname__)


def test_what_is_below_a_replacement_that_is_in_place_no_more(shelf: types.ModuleType) -> None:
    work, patches = shelf.work, PatchSet()
    first = replacement_of(work)
    assert below_restored(first) is work
    patches.replace(shelf, "work", first)
    # Another one around it, which stands nowhere.
    assert below_restored(replacement_of(first)) is first
    patches.restore()
    assert below_restored(replacement_of(first)) is work


def test_only_the_bearer_of_a_mark_is_a_replacement(shelf: types.ModuleType) -> None:
    ours = replacement_of(shelf.work)

    @functools.wraps(ours)
    def theirs() -> None: ...

    class Always:
        def __getattr__(self, name: str) -> Always:
            return self

    odd = Always()
    for value in (theirs, odd, None, 1, shelf.work):
        assert original_of(value) is value


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_descriptors_carry_a_mark_of_their_own(kind: Any) -> None:
    original = kind(len)
    ours = mark(kind(replacement_of(len)), original)
    assert original_of(ours) is original
    assert original_of(kind(replacement_of(len))) is not original


def test_a_replacement_is_named_by_a_place_where_it_stands(shelf: types.ModuleType) -> None:
    work = shelf.work
    ours = replacement_of(work)
    work.__module__ = "shelf"
    alias = module_with("shelf_alias", work=ours)
    name_by(ours, "shelf_alias", "work")
    # The definition still holds the original, so by that name a pickle would not find ours.
    assert (ours.__module__, ours.__qualname__) == ("shelf_alias", "work")
    assert alias.work is ours
    shelf.work = ours  # type: ignore[attr-defined]
    ours.__module__ = "shelf"
    name_by(ours, "shelf_alias", "work")
    assert ours.__module__ == "shelf"
