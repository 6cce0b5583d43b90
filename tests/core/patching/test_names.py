"""Who waits for a module to be imported, and dotted names that are resolved without an import."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import types
from pathlib import Path

import pytest

from autoamp.core import PatchSet, explain_missing, original_of, resolve, spelled_out
from autoamp.errors import PatchError
from tests.core.patching._shared import Base, package, replacement_of

# -- waiting for an import --


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
    (folder / "again.py").touch()
    seen: list[types.ModuleType] = []
    for count in (1, 2):
        patches = PatchSet()
        patches.when_imported("again", seen.append)
        importlib.import_module("again")
        assert len(seen) == count
        del sys.modules["again"]
        patches.restore()


def test_the_watcher_does_not_grow() -> None:
    from wrapt.importer import _post_import_hooks

    kept, hooks = set(), set()
    for _ in range(20):
        patches = PatchSet()
        patches.when_imported("never_imported_by_anyone", print)
        patches.restore()
        del patches
        gc.collect()
        kept.add(sum(type(found) is PatchSet for found in gc.get_objects()))
        hooks.add(len(_post_import_hooks["never_imported_by_anyone"]))
    assert hooks == {1}
    assert len(kept) == 1


def test_a_set_that_is_restored_while_an_import_runs_gets_no_patch(folder: Path) -> None:
    (folder / "slow.py").write_text("def work(): pass\n")
    patches, inside, go_on = PatchSet(), threading.Event(), threading.Event()

    def wait_and_patch(module: types.ModuleType) -> None:
        inside.set()
        go_on.wait(10)
        patches.replace(module, "work", replacement_of(module.work))

    patches.when_imported("slow", wait_and_patch)
    importing = threading.Thread(target=importlib.import_module, args=("slow",))
    importing.start()
    assert inside.wait(10)
    restoring = threading.Thread(target=patches.restore)
    restoring.start()
    go_on.set()
    importing.join(10)
    restoring.join(10)
    assert original_of(sys.modules["slow"].work) is sys.modules["slow"].work
    assert list(patches) == []


# -- nearest --


@pytest.fixture
def near_package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`near_pkg` with `inner`, and `near_pkg.hidden`, which is imported and no attribute of it."""
    modules = {name: types.ModuleType(name) for name in ("near_pkg", "near_pkg.inner", "near_pkg.hidden")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        module.Linear = type("Linear", (), dict.fromkeys(["forward", "for_ward", "forwards", "forwarx"]))
        module.options = []
    modules["near_pkg"].inner = modules["near_pkg.inner"]
    return modules["near_pkg"]


@pytest.mark.parametrize(
    ("dotted", "said"),
    [
        ("near_pkg.zzz", "near_pkg has no 'zzz'"),
        ("near_pkg.Linar", "near_pkg has no 'Linar'; did you mean 'near_pkg.Linear'?"),
        ("near_pkg.iner.Linear.forward", "near_pkg has no 'iner'; did you mean 'near_pkg.inner.Linear.forward' or "
         "'near_pkg.Linear.Linear.forward'?"),
        ("near_pkg.inner.Linar", "near_pkg.inner has no 'Linar'; did you mean 'near_pkg.inner.Linear'?"),
        ("near_pkg.hidden.Linar.a", "near_pkg.hidden has no 'Linar'; did you mean 'near_pkg.hidden.Linear.a'?"),
        ("near_pkg.hidden.options.apend", "near_pkg.hidden.options has no 'apend'; did you mean "
         "'near_pkg.hidden.options.append'?"),
        ("near_pkg.optoins", "near_pkg has no 'optoins'"),
        # What has parts of its own may be anything.
        ("near_pkg.optoins.a", "near_pkg has no 'optoins'; did you mean 'near_pkg.options.a'?"),
    ],
)  # fmt: skip
def test_the_nearest_names_of_one_that_is_not_there(near_package: types.ModuleType, dotted: str, said: str) -> None:
    assert explain_missing(dotted, callable) == said
    # At most three are named.
    assert explain_missing("near_pkg.Linear.forwar").count(" or ") == 2


# -- resolve --


def test_resolve_finds_functions_methods_and_modules(shelf: types.ModuleType, patches: PatchSet) -> None:
    shelf.Base, work = Base, shelf.work  # type: ignore[attr-defined]
    assert resolve("shelf.work") == (shelf, "work", work)
    assert resolve("shelf.Base.method") == (Base, "method", vars(Base)["method"])
    assert resolve("shelf.Base.static") == (Base, "static", vars(Base)["static"])
    assert resolve("os.path") == (os, "path", os.path)
    assert resolve("not_imported_at_all.work") is None
    with pytest.raises(PatchError, match=r"'shelf\.wrok' does not exist"):
        resolve("shelf.wrok")
    patches.replace(shelf, "work", replacement_of(work))
    assert resolve("shelf.work") == (shelf, "work", work)


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("nn.Linear", "torch.nn.Linear"),
        ("F.softmax", "torch.nn.functional.softmax"),
        ("functional.relu", "torch.nn.functional.relu"),
        ("nn.NoSuchLayer", None),
        ("A.softmax", None),
        ("Linear", None),
        # Of modules that are there, whatever torch has by that name.
        ("random.seed", None),
        ("optim.SGD", None),
    ],
)
def test_short_names_of_torch_are_spelled_out(folder: Path, short: str, whole: str | None) -> None:
    (folder / "optim.py").touch()
    assert spelled_out(short) == whole
    assert "optim" not in sys.modules


def test_resolve_imports_nothing(folder: Path) -> None:
    lazily = "import importlib\ndef __getattr__(name):\n    return importlib.import_module(f'lazy_pkg.{name}')\n"
    package(folder, "lazy_pkg", init=lazily, losses="def focal(): pass\n")
    assert resolve("lazy_pkg.losses.focal") is None
    assert "lazy_pkg" not in sys.modules
    importlib.import_module("lazy_pkg")
    assert resolve("lazy_pkg.losses.focal") is None
    assert "lazy_pkg.losses" not in sys.modules
    losses = importlib.import_module("lazy_pkg.losses")
    assert resolve("lazy_pkg.losses.focal") == (losses, "focal", losses.focal)
    with pytest.raises(PatchError, match=r"'lazy_pkg\.losses\.facol' does not exist"):
        resolve("lazy_pkg.losses.facol")
    package(folder, "small_pkg")
    small = importlib.import_module("small_pkg")
    with pytest.raises(PatchError, match=r"'small_pkg\.wrok' does not exist"):
        resolve("small_pkg.wrok")
    assert not hasattr(small, "wrok")
