"""Patches are put in place and taken back exactly; what a replacement bears."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from typing import Any
from unittest import mock

import pytest
import wrapt

from autoamp.core import PatchSet, check_writable, imitate, mark, name_by, original_of
from autoamp.errors import PatchError
from tests.core.patching._shared import NOTHING, Base, Derived, module_with, replacement_of

# -- one patch --


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_an_inherited_attribute_leaves_no_shadow(name: str, patches: PatchSet) -> None:
    held = vars(Base)[name]
    for parent in (Derived, Base, Base()):
        check_writable(parent, name)
    assert name not in vars(Derived)
    assert vars(Base)[name] is held
    patches.replace(Derived, name, held)
    assert name in vars(Derived)
    assert patches.restore() == NOTHING
    assert name not in vars(Derived)
    assert vars(Base)[name] is held


def test_an_attribute_of_an_object_is_patched_on_the_object_alone(patches: PatchSet) -> None:
    one, other = Base(), Base()
    patches.replace(one, "method", lambda: "patched")
    assert (one.method(), other.method()) == ("patched", "base")
    patches.restore()
    assert vars(one) == {}


@pytest.mark.parametrize(("parent", "name"), [(int, "bit_length"), (object(), "anything")])
def test_what_cannot_be_written_is_told_by_name(parent: Any, name: str, patches: PatchSet) -> None:
    with pytest.raises(PatchError, match=f"{getattr(parent, '__name__', 'object')}.{name} cannot be replaced"):
        patches.replace(parent, name, None)
    with pytest.raises(PatchError, match="cannot be replaced"):
        check_writable(parent, name)
    assert list(patches) == []


# -- sets --


def test_patches_are_restored_in_reverse_order(shelf: types.ModuleType, patches: PatchSet) -> None:
    work = shelf.work
    for _ in range(2):
        ours = replacement_of(shelf.work)
        patches.replace(shelf, "work", ours)
        assert shelf.work is ours
    assert [patch.name for patch in patches] == ["shelf.work", "shelf.work"]
    assert patches.restore() == NOTHING
    assert shelf.work is work
    assert list(patches) == []
    for _ in range(2):
        patches.replace(shelf, "work", replacement_of(shelf.work))
    shelf.work = print
    assert patches.restore() == ("shelf.work",)


def test_a_failure_takes_back_its_own_patches_only(shelf: types.ModuleType, patches: PatchSet) -> None:
    other = module_with("shelf_b", work=shelf.work)
    work, first = shelf.work, replacement_of(shelf.work)
    patches.replace(shelf, "work", first)

    def fail_half_way() -> None:
        with patches.all_or_nothing():
            patches.rebind({id(work): (work, first)}, lambda name: False)
            assert other.work is first
            assert patches.late_bound == ("shelf_b.work",)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert shelf.work is first
    assert other.work is work
    assert patches.late_bound == ()


# -- others who patch --


@pytest.mark.parametrize("kind", ["plain", "wraps", "wrapt", "mock"])
def test_a_patch_on_top_is_reported_and_left(
    kind: str, shelf: types.ModuleType, patches: PatchSet, caplog: pytest.LogCaptureFixture
) -> None:
    ours = replacement_of(shelf.work)
    patches.replace(shelf, "work", ours)
    foreign: Any = lambda a: ours(a)  # noqa: E731
    if kind == "wraps":
        foreign = functools.wraps(ours)(foreign)
    elif kind == "wrapt":
        foreign = wrapt.FunctionWrapper(ours, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    elif kind == "mock":
        foreign = mock.MagicMock(side_effect=ours)
    shelf.work = foreign
    with caplog.at_level(logging.WARNING, "autoamp"):
        assert patches.restore() == ("shelf.work",)
    assert "shelf.work" in caplog.text
    assert shelf.work is foreign
    assert shelf.work(1) == 3
    # What somebody made of ours is theirs: a later patch goes on top of it, and must not reach below.
    assert original_of(foreign) is foreign


@pytest.mark.parametrize("failed", [False, True])
def test_what_outlived_its_set_under_a_foreign_patch_gives_way(shelf: types.ModuleType, failed: bool) -> None:
    work, foreign = shelf.work, mock.patch.object(shelf, "work")
    first, second = PatchSet(), PatchSet()

    def fail_under_a_foreign_patch() -> None:
        with first.all_or_nothing():
            first.replace(shelf, "work", replacement_of(work))
            foreign.start()
            raise KeyError

    if failed:
        with pytest.raises(KeyError):
            fail_under_a_foreign_patch()
    else:
        first.replace(shelf, "work", replacement_of(work))
        foreign.start()
        assert first.restore() == ("shelf.work",)
    # The foreign patch is gone and has put our dead replacement back.
    foreign.stop()
    assert shelf.work is not work
    assert original_of(shelf.work) is work
    second.replace(shelf, "work", replacement_of(original_of(shelf.work)))
    assert second.restore() == NOTHING
    assert shelf.work is work


def test_what_outlived_its_set_in_place_of_an_inherited_attribute_leaves_no_shadow() -> None:
    first, second = PatchSet(), PatchSet()
    method = vars(Base)["method"]
    first.replace(Derived, "method", replacement_of(method))
    with mock.patch.object(Derived, "method"):
        first.restore()
    assert "method" in vars(Derived)
    second.replace(Derived, "method", replacement_of(method))
    second.restore()
    assert "method" not in vars(Derived)


# -- names that others took --


def test_names_taken_before_and_meanwhile_are_restored(shelf: types.ModuleType, patches: PatchSet) -> None:
    user, skipped = module_with("shelf_user", mine=shelf.work), module_with("shelf_skipped", mine=shelf.work)
    sys.modules["shelf_odd"] = "no module"  # type: ignore[assignment]
    work, ours = shelf.work, replacement_of(shelf.work)
    patches.replace(shelf, "work", ours)
    patches.rebind({id(work): (work, ours)}, lambda name: name == "shelf_skipped")
    meanwhile = module_with("shelf_meanwhile", mine=shelf.work)
    assert user.mine is ours
    assert skipped.mine is work
    assert patches.late_bound == ("shelf_user.mine",)
    assert patches.restore() == NOTHING
    assert user.mine is meanwhile.mine is work
    assert patches.late_bound == ()


# -- what a replacement bears --


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
