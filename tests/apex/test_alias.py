"""Being `apex`: found by import and every way of probing while installed, and gone afterwards."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.apex import alias, install_as_apex, uninstall
from autoamp.apex.missing import REMEDIES
from autoamp.core import current_handle
from autoamp.errors import LossScaleError, UsageError

# Files that Apex did not have, and that programs have no use for.
OWN = ("alias", "fastai1", "formulas", "initialize", "levels", "missing")
TREE = Path(alias.__file__).parent
PATHS = [path.relative_to(TREE).with_suffix("").parts for path in TREE.rglob("*.py")]
MODULES = sorted(
    ".".join(("apex", *parts)).removesuffix(".__init__") for parts in PATHS if parts[0] not in (*OWN, "amp_C", "apex_C")
)


# After a change on purpose: python -m tests.apex.test_alias
NAMES = Path(__file__).with_name("apex_names.txt")


def described() -> Iterator[str]:
    """Yield each name of the list, and where the class or function that has it is defined."""
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        name = line.split()[0]
        module, _, entry = name.rpartition(".")
        value = getattr(importlib.import_module(module), entry)
        assert isinstance(value, (type, types.FunctionType)), name
        yield f"{name} {value.__module__}.{value.__qualname__}"


def test_each_name_is_a_class_or_function_of_autoamp(apex: Any) -> None:
    """So a pickle finds it, and a spawned child does, without the alias."""
    lines = list(described())
    assert lines == NAMES.read_text(encoding="utf-8").splitlines()
    assert all(line.split()[1].startswith("autoamp.") for line in lines)
    assert apex.parallel.ReduceOp is torch.distributed.ReduceOp


def test_every_module_is_that_of_the_package_and_has_a_spec(apex: Any) -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        assert sys.modules[name] is module
        # It is the module itself: a patch of one is a patch of the other, and so is a pickle.
        assert module is importlib.import_module(f"autoamp.{name}")
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec is module.__spec__
        assert spec.name == module.__name__ == f"autoamp.{name}"
        # Names are true entries: libraries look into `__dict__`.
        assert all(hasattr(module, entry) for entry in vars(module))


def test_names_of_a_package_go_before_its_modules(apex: Any) -> None:
    from apex.parallel.LARC import LARC

    assert apex.parallel.LARC is LARC
    assert apex.optimizers.fused_lamb.FusedLAMB is apex.optimizers.FusedLAMB


@pytest.mark.usefixtures("apex")
@pytest.mark.filterwarnings("error")
def test_the_launcher_runs_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["multiproc"])
    with pytest.raises(UsageError, match=r"python -m apex\.parallel\.multiproc"):
        runpy.run_module("apex.parallel.multiproc", run_name="__main__", alter_sys=True)


def test_specs_while_installed_and_not_otherwise(apex: Any) -> None:
    names = ["apex", "apex.amp", "apex.normalization", "apex.amp._amp_state", "amp_C", "apex_C"]
    assert all(importlib.util.find_spec(name) is not None for name in names)
    assert importlib.util.find_spec("apex.nope") is None
    assert importlib.metadata.version("apex") == importlib.metadata.version("Apex") == apex.__version__
    assert {"apex", "amp_C", "apex_C"} <= set(importlib.metadata.packages_distributions())
    uninstall()
    assert importlib.util.find_spec("apex") is None
    assert importlib.util.find_spec("amp_C") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.util.find_spec("apex.amp")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    uninstall()
    assert not alias.is_installed()


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("from apex.optimizers import FusedNope", "torch.optim"), ("import apex.transformer", "Megatron"),
        ("from apex.contrib.sparsity import ASP", "WeightNormSparsifier"),
        ("import apex.pyprof.prof", "torch.profiler"), ("from apex.contrib.fmha import FMHA", "scaled_dot_product"),
        ("from apex.amp.wrap import cached_cast", "register_half_function"),
        ("from amp_C import multi_tensor_lamb_mp", "apex.optimizers"),
        ("import apex.contrib.cudnn_gbn", "SyncBatchNorm"), ("from apex.RNN.RNNBackend import RNNCell", "LSTM"),
        ("from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam", "ZeroRedundancyOptimizer"),
        ("from apex.contrib.optimizers import DistributedFusedLAMB", "ZeroRedundancyOptimizer"),
        ("from apex.parallel import nope", "DistributedDataParallel"), ("import apex.contrib.bottleneck", "Bottleneck"),
        ("from apex.amp import nope", "docs/migration.md"),
    ],
)  # fmt: skip
def test_missing_names_are_import_errors_with_the_remedy(apex: Any, statement: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=r"does not provide|is not provided") as caught:
        exec(statement)
    assert remedy in str(caught.value)
    assert "docs/migration.md" in str(caught.value)


def test_no_remedy_is_for_a_name_that_is_there(apex: Any) -> None:
    """Those of a package are for the names below it that are missing."""
    for name in REMEDIES:
        parent, _, last = name.rpartition(".")
        if last.startswith("Fused"):
            with pytest.raises(ImportError):
                exec(f"from {parent} import {last}")


def test_missing_attributes_are_attribute_errors(apex: Any) -> None:
    for module in (apex, apex.amp, apex.optimizers, apex.parallel, apex.amp.handle):
        assert getattr(module, "no_such_name", 3) == 3
    with pytest.raises(AttributeError, match=r"Megatron.*migration"):
        _ = apex.transformer


def test_a_program_may_add_a_folder_to_the_package(apex: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added_by_hand.py").write_text("VALUE = 3\n")
    monkeypatch.setattr(apex, "__path__", [*apex.__path__, str(tmp_path)])
    assert importlib.import_module("apex.added_by_hand").VALUE == 3
    # It is the program's, and so would stay there.
    del sys.modules["apex.added_by_hand"]


def test_none_in_sys_modules_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    install_as_apex()
    try:
        with pytest.raises(ImportError):
            import apex  # noqa: F401
    finally:
        uninstall()
    assert sys.modules["apex"] is None


@pytest.mark.parametrize("name", ["apex.mlp", "apex.contrib", "apex.fused_dense"])
def test_a_module_that_is_forbidden_forbids_no_other(apex: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    uninstall()
    monkeypatch.setitem(sys.modules, name, None)
    install_as_apex()
    assert importlib.import_module("apex.amp").initialize


def test_a_mere_directory_is_no_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    install_as_apex()
    try:
        assert importlib.import_module("apex").amp
    finally:
        uninstall()


def test_second_call_takes_the_new_options(apex: Any) -> None:
    finders = len(sys.meta_path)
    install_as_apex(dtype=torch.bfloat16, lists="default")
    assert alias.options().dtype is torch.bfloat16
    assert alias.options().lists == ("apex", "default")
    assert len(sys.meta_path) == finders


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


if __name__ == "__main__":
    install_as_apex(device_type="cpu")
    lines = [f"{line}\n" for line in described()]
    NAMES.write_text("".join(lines), encoding="utf-8")
