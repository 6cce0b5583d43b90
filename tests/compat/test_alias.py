"""Being `apex`: found by import and every way of probing while installed, and gone afterwards."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.compat import alias, install_as_apex, uninstall
from autoamp.errors import LossScaleError, UsageError
from autoamp.runtime import current_handle

TREE = Path(alias.__file__).parent / "apex"
MODULES = sorted(
    ".".join(path.relative_to(TREE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in TREE.rglob("*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_with_a_spec_and_an_entry_of_its_own(apex: Any, name: str) -> None:
    module = importlib.import_module(name)
    assert sys.modules[name] is module
    assert module.__name__ == name
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.name == name
    # Names are true entries: libraries look into `__dict__`.
    assert all(hasattr(module, entry) for entry in vars(module))


def test_modules_have_no_second_copy(apex: Any) -> None:
    import apex.amp
    import apex.parallel.distributed
    from apex import amp

    assert amp is apex.amp is sys.modules["apex.amp"]
    assert apex.parallel.DistributedDataParallel is apex.parallel.distributed.DistributedDataParallel


def test_probes(apex: Any) -> None:
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.nope") is None
    assert importlib.metadata.version("apex") == apex.__version__
    assert hasattr(apex, "amp")
    assert not hasattr(apex, "nope")
    assert "state_dict" in apex.amp.__dict__


def test_a_program_may_add_a_folder_to_the_package(apex: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added_by_hand.py").write_text("VALUE = 3\n")
    monkeypatch.setattr(apex, "__path__", [*apex.__path__, str(tmp_path)])
    assert importlib.import_module("apex.added_by_hand").VALUE == 3
    # It is the program's, and so would stay there.
    del sys.modules["apex.added_by_hand"]


def test_nothing_is_found_without_it() -> None:
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    uninstall()
    assert not alias.is_installed()


@pytest.mark.parametrize(
    "statement",
    ["import apex.contrib.bottleneck", "from apex.optimizers import FusedNope", "from apex.amp.scaler import Nope"],
)
def test_missing_names_are_import_errors_with_a_remedy(apex: Any, statement: str) -> None:
    with pytest.raises(ImportError, match=r"does not provide|is not provided") as caught:
        exec(statement)
    assert "docs/migration.md" in str(caught.value)


def test_missing_attribute_is_an_attribute_error(apex: Any) -> None:
    with pytest.raises(AttributeError, match=r"Megatron.*migration"):
        _ = apex.transformer


def test_none_in_sys_modules_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    install_as_apex()
    try:
        with pytest.raises(ImportError):
            import apex  # noqa: F401
    finally:
        uninstall()
    assert sys.modules["apex"] is None


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real package of the name `apex`, from the time when it had `amp`."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "amp.py").touch()
    file = tmp_path / "apex" / "__init__.py"
    file.write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_real_apex_is_not_hidden_unasked(real: Path) -> None:
    with pytest.raises(UsageError, match="shadow=True"):
        install_as_apex()
    assert not alias.is_installed()
    install_as_apex(shadow=True)
    try:
        import apex

        assert not hasattr(apex, "real")
    finally:
        uninstall()
    import apex

    assert apex.real
    del sys.modules["apex"]


def test_imported_real_apex_comes_back(real: Path) -> None:
    import apex

    before = apex
    try:
        install_as_apex(shadow=True)
        assert importlib.import_module("apex") is not before
        uninstall()
        assert sys.modules["apex"] is before
    finally:
        del sys.modules["apex"]


def test_a_mere_directory_is_no_apex(real: Path) -> None:
    for file in real.parent.iterdir():
        file.unlink()
    install_as_apex()
    try:
        assert importlib.import_module("apex").amp
    finally:
        uninstall()


def test_second_call_takes_the_new_options(apex: Any) -> None:
    install_as_apex(dtype=torch.bfloat16, lists="default")
    assert alias.options().dtype is torch.bfloat16
    assert alias.options().lists == ("apex", "default")
    assert sum(isinstance(finder, alias._ApexFinder) for finder in sys.meta_path) == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O3", None])
def test_overflows_are_traced_where_that_is_asked_for(apex: Any, level: str | None) -> None:
    install_as_apex(device_type="cpu", trace_overflow=True)
    amp = importlib.import_module("apex.amp")
    if level is None:
        amp.init()
    else:
        model = torch.nn.Linear(2, 2)
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    handle = current_handle()
    assert handle is not None
    assert handle.overflows is not None
    handle.deactivate()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"dtype": torch.float32}, UsageError),
        ({"opt_level": "O4"}, UsageError),
        ({"device_type": "gpu"}, UsageError),
        ({"loss_scale": -1.0}, LossScaleError),
    ],
)
def test_wrong_options_change_nothing(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        install_as_apex(**wrong)
    assert not alias.is_installed()
