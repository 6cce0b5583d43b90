"""Patches: what is written, what is put back, and what others wrote in between."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wrapt

from autoamp.errors import PatchError
from autoamp.patching import imports
from autoamp.patching.imports import resolve
from autoamp.patching.marks import SHORTCUT, imitate, mark, name_by, offer_shortcut, original_of
from autoamp.patching.patches import Patch, PatchSet, check_writable

NOTHING: tuple[str, ...] = ()


def replacement_of(original: Any, module: str = "shelf", qualname: str = "work") -> Any:
    """A replacement that passes calls through, dressed as this package's are."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return imitate(replacement, original, module, qualname)


@pytest.fixture
def shelf() -> Iterator[types.ModuleType]:
    """A module ``shelf`` with a function ``work``, that another module can import from."""
    module = types.ModuleType("shelf")
    exec("def work(a, b=2):\n    'Adds.'\n    return a + b\n", vars(module))
    sys.modules["shelf"] = module
    yield module
    for name in [name for name in sys.modules if name.startswith("shelf")]:
        del sys.modules[name]


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    """A patch set that is restored after the test."""
    made = PatchSet()
    yield made
    made.restore()


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def of_class(cls, value: int) -> tuple[type, int]:
        return cls, value


class Derived(Base):
    pass


def module_with(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


# -- one patch --


def test_a_patch_restores_the_identical_object(shelf: types.ModuleType) -> None:
    work = shelf.work
    patch = Patch.of(shelf, "work", replacement_of(work))
    patch.apply()
    assert shelf.work is patch.replacement
    assert patch.restore()
    assert shelf.work is work


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_an_inherited_attribute_leaves_no_shadow(name: str, patches: PatchSet) -> None:
    held = vars(Base)[name]
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
    assert len(patches) == 0


def test_check_writable_changes_nothing() -> None:
    before = dict(vars(Derived)), dict(vars(Base))
    for parent, name in ((Derived, "method"), (Base, "method"), (Base, "static"), (Base(), "method")):
        check_writable(parent, name)
    assert (dict(vars(Derived)), dict(vars(Base))) == before


# -- sets --


def test_patches_are_restored_in_reverse_order(shelf: types.ModuleType, patches: PatchSet) -> None:
    work = shelf.work
    first, second = replacement_of(work), replacement_of(work)
    patches.replace(shelf, "work", first)
    patches.replace(shelf, "work", second)
    assert [patch.name for patch in patches] == ["shelf.work", "shelf.work"]
    assert shelf.work is second
    assert patches.restore() == NOTHING
    assert shelf.work is work
    assert len(patches) == 0


def test_a_block_that_fails_takes_back_its_own_patches_only(shelf: types.ModuleType, patches: PatchSet) -> None:
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


def test_a_name_patched_twice_is_reported_once(shelf: types.ModuleType, patches: PatchSet) -> None:
    for _ in range(2):
        patches.replace(shelf, "work", replacement_of(shelf.work))
    shelf.work = print
    assert patches.restore() == ("shelf.work",)


def test_what_outlived_its_set_under_a_foreign_patch_gives_way(shelf: types.ModuleType) -> None:
    work = shelf.work
    first, second = PatchSet(), PatchSet()
    first.replace(shelf, "work", replacement_of(work))
    with mock.patch.object(shelf, "work"):
        assert first.restore() == ("shelf.work",)
    # The foreign patch is gone and has put our dead replacement back.
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


def test_names_taken_before_are_rebound_and_restored(shelf: types.ModuleType, patches: PatchSet) -> None:
    user, skipped = module_with("shelf_user", mine=shelf.work), module_with("shelf_skipped", mine=shelf.work)
    sys.modules["shelf_odd"] = "no module"  # type: ignore[assignment]
    work, ours = shelf.work, replacement_of(shelf.work)
    patches.replace(shelf, "work", ours)
    patches.rebind({id(work): (work, ours)}, lambda name: name == "shelf_skipped")
    assert user.mine is ours
    assert skipped.mine is work
    assert patches.late_bound == ("shelf_user.mine",)
    assert patches.restore() == NOTHING
    assert user.mine is work
    assert patches.late_bound == ()


def test_names_taken_meanwhile_are_restored(shelf: types.ModuleType, patches: PatchSet) -> None:
    work = shelf.work
    patches.replace(shelf, "work", replacement_of(work))
    user = module_with("shelf_user", mine=shelf.work)
    assert patches.restore() == NOTHING
    assert user.mine is work


# -- imports --


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_callbacks_come_once_the_module_is_there_and_not_after_restore(folder: Path, patches: PatchSet) -> None:
    (folder / "late_one.py").write_text("VALUE = 1\n")
    (folder / "late_two.py").write_text("VALUE = 2\n")
    seen: list[str] = []
    patches.when_imported("late_one", lambda module: seen.append(f"{module.__name__} {module.VALUE}"))
    patches.when_imported("late_two", lambda module: seen.append("too late"))
    patches.when_imported("sys", lambda module: seen.append("sys is there already"))
    assert seen == []
    importlib.import_module("late_one")
    assert seen == ["late_one 1"]
    patches.restore()
    importlib.import_module("late_two")
    assert seen == ["late_one 1"]


def test_a_module_that_is_imported_anew_is_seen_anew(folder: Path) -> None:
    (folder / "again.py").write_text("VALUE = 1\n")
    seen: list[types.ModuleType] = []
    for count in (1, 2):
        patches = PatchSet()
        patches.when_imported("again", seen.append)
        importlib.import_module("again")
        assert len(seen) == count
        del sys.modules["again"]
        patches.restore()


def test_the_watcher_does_not_grow() -> None:
    def cycle() -> None:
        patches = PatchSet()
        patches.when_imported("never_imported_by_anyone", print)
        patches.restore()

    from wrapt.importer import _post_import_hooks

    cycle()
    hooks = len(_post_import_hooks["never_imported_by_anyone"])
    listeners = len(imports.watcher._listeners)
    for _ in range(20):
        cycle()
    assert len(_post_import_hooks["never_imported_by_anyone"]) == hooks == 1
    assert len(imports.watcher._listeners) == listeners
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is PatchSet and len(found)]


def test_a_set_that_is_restored_while_an_import_runs_gets_no_patch(folder: Path) -> None:
    (folder / "slow.py").write_text("def work(): pass\n")
    patches, inside, go_on = PatchSet(), threading.Event(), threading.Event()

    def block(module: types.ModuleType) -> None:
        inside.set()
        go_on.wait(10)
        patches.replace(module, "work", replacement_of(module.work))

    patches.when_imported("slow", block)
    importing = threading.Thread(target=importlib.import_module, args=("slow",))
    importing.start()
    assert inside.wait(10)
    restoring = threading.Thread(target=patches.restore)
    restoring.start()
    go_on.set()
    importing.join(10)
    restoring.join(10)
    assert original_of(sys.modules["slow"].work) is sys.modules["slow"].work
    assert len(patches) == 0


# -- resolve --


def test_resolve_finds_functions_methods_and_modules(shelf: types.ModuleType) -> None:
    shelf.Base = Base  # type: ignore[attr-defined]
    assert resolve("shelf.work") == (shelf, "work", shelf.work)
    assert resolve("shelf.Base.method") == (Base, "method", vars(Base)["method"])
    assert resolve("shelf.Base.static") == (Base, "static", vars(Base)["static"])
    assert resolve("not_imported_at_all.work") is None
    with pytest.raises(PatchError, match=r"'shelf\.wrok' is not there"):
        resolve("shelf.wrok")


def test_resolve_takes_our_replacement_off(shelf: types.ModuleType, patches: PatchSet) -> None:
    work = shelf.work
    patches.replace(shelf, "work", replacement_of(work))
    assert resolve("shelf.work") == (shelf, "work", work)


def test_resolve_imports_nothing(folder: Path) -> None:
    package = folder / "lazy_pkg"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n    return importlib.import_module(f'lazy_pkg.{name}')\n"
    )
    (package / "losses.py").write_text("def focal(): pass\n")
    assert resolve("lazy_pkg.losses.focal") is None
    assert "lazy_pkg" not in sys.modules
    importlib.import_module("lazy_pkg")
    assert resolve("lazy_pkg.losses.focal") is None
    assert "lazy_pkg.losses" not in sys.modules
    losses = importlib.import_module("lazy_pkg.losses")
    assert resolve("lazy_pkg.losses.focal") == (losses, "focal", losses.focal)


# -- replacements --


def test_a_replacement_looks_like_its_original(shelf: types.ModuleType) -> None:
    ours = replacement_of(shelf.work)
    assert ours.__name__ == "work"
    assert ours.__doc__ == "Adds."
    assert inspect.signature(ours) == inspect.signature(shelf.work)
    assert original_of(ours) is shelf.work
    assert original_of(replacement_of(ours)) is shelf.work


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


def test_a_shortcut_names_the_replacement_that_offers_it() -> None:
    replacement = replacement_of(len)
    offer_shortcut(replacement, abs)
    assert getattr(replacement, SHORTCUT) == (replacement, abs)

    @functools.wraps(replacement)
    def around(*args: Any) -> Any:
        return replacement(*args)

    # What copies the attributes of a replacement is not taken for it.
    assert getattr(around, SHORTCUT)[0] is not around
