"""Beside an installed apex: what it lacks is added, what it has is left alone, and all of it is undone."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoamp.apex import install_as_apex, uninstall
from autoamp.apex.alias import added_to_real_apex
from autoamp.errors import UsageError
from tests.launches import ROOT, launched

# The packages of NVIDIA's apex since amp was removed, as far as a program sees them without a GPU.
REAL = {
    "__init__.py": "from . import optimizers, normalization\n__all__ = ['optimizers', 'normalization']\n",
    "optimizers/__init__.py": "from .fused_adam import FusedAdam\n",
    "optimizers/fused_adam.py": "import torch\nclass FusedAdam(torch.optim.Adam):\n    is_real = True\n",
    "normalization/__init__.py": "import torch\nclass FusedLayerNorm(torch.nn.LayerNorm):\n    is_real = True\n",
    "multi_tensor_apply/__init__.py": "",
    "parallel/__init__.py": "is_real = True\n",
    "contrib/__init__.py": "",
    "contrib/clip_grad/__init__.py": "is_real = True\n",
}
PROGRAM = """\
import torch
import apex
from apex import amp
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedAdam
import apex.contrib.clip_grad, apex.contrib.xentropy, apex.parallel

assert FusedAdam.is_real and apex.normalization.FusedLayerNorm.is_real
assert apex.parallel.is_real and apex.contrib.clip_grad.is_real
assert apex.amp.lists.functional_overrides.FP16_FUNCS is not None and apex.pyprof.nvtx.nvmarker
assert apex.amp is amp and hasattr(apex.contrib.xentropy, "SoftmaxCrossEntropyLoss")
model = torch.nn.Linear(8, 4)
model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=0.1), opt_level="O2", loss_scale=128.0)
before = model.weight.clone()
with amp.scale_loss(model(torch.ones(2, 8)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
assert model.weight.dtype is torch.float16 and not torch.equal(model.weight, before)
try:
    import apex.transformer
except ImportError as error:
    print(error)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in REAL.items():
        file = tmp_path / "site" / "apex" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path / "site"


@pytest.fixture
def importable(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    _forget_apex()
    monkeypatch.syspath_prepend(str(site))
    yield site / "apex"
    _forget_apex()


def _forget_apex() -> None:
    """Take the alias away, and all modules of an `apex`, also those that other tests have imported."""
    uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def test_what_a_real_apex_lacks_is_added(importable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_as_apex(device_type="cpu")
    exec(PROGRAM, {})
    assert "Megatron" in capsys.readouterr().out


@pytest.mark.processes
def test_the_command_adds_what_a_real_apex_lacks(site: Path) -> None:
    (site / "program.py").write_text(PROGRAM, encoding="utf-8")
    runs = {"run": ["run", "--device-type", "cpu", "program.py"]}
    ended = launched(site, runs, PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))["run"]
    assert ended.code == 0, ended.err
    assert "Megatron" in ended.out
    assert "autoamp adds what it lacks: RNN, amp, fp16_utils" in ended.err.replace("\n  ", " ")


@pytest.mark.parametrize("is_imported", [False, True])
def test_modules_are_added_and_taken_back(importable: Path, is_imported: bool) -> None:
    real = importlib.import_module("apex") if is_imported else None
    modules, finders = {name for name in sys.modules if name.startswith("apex")}, [*sys.meta_path]
    install_as_apex(device_type="cpu")
    apex = importlib.import_module("apex")
    assert real is None or apex is real
    assert apex.__file__ == str(importable / "__init__.py")
    assert callable(apex.amp.initialize)
    assert apex.fp16_utils.FP16_Optimizer
    assert type(apex.__loader__) is type(apex.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert importlib.util.find_spec("apex.transformer") is None
    uninstall()
    assert sys.meta_path == finders
    assert not hasattr(apex, "amp")
    assert is_imported <= ({name for name in sys.modules if name.startswith("apex")} == modules)
    with pytest.raises(ImportError):
        importlib.import_module("apex.amp")


@pytest.mark.parametrize("broken", ["__init__.py", "optimizers/fused_adam.py"])
def test_an_apex_that_cannot_be_imported_tells_the_remedy(importable: Path, broken: str) -> None:
    (importable / broken).write_text("raise ImportError('undefined symbol')\n", encoding="utf-8")
    install_as_apex(device_type="cpu")
    with pytest.raises(ImportError, match="undefined symbol") as caught:
        importlib.import_module("apex.optimizers")
    assert [note for note in caught.value.__notes__ if "--shadow-apex" in note] == caught.value.__notes__[:1]
    install_as_apex(device_type="cpu", shadow=True)
    assert importlib.import_module("apex.amp").initialize


def test_shadow_hides_it_after_the_addition_too(importable: Path) -> None:
    real = importlib.import_module("apex")
    install_as_apex(device_type="cpu")
    install_as_apex(device_type="cpu", shadow=True)
    assert not hasattr(importlib.import_module("apex.optimizers").FusedAdam, "is_real")
    uninstall()
    assert importlib.import_module("apex") is real
    assert not hasattr(real, "amp")


@pytest.mark.parametrize("name", ["apex.transformer", "apex.contrib.bottleneck"])
def test_a_hidden_apex_gives_what_the_alias_lacks(importable: Path, name: str) -> None:
    folder = importable.joinpath(*name.split(".")[1:])
    folder.mkdir()
    (folder / "__init__.py").write_text("from apex.fp16_utils import FP16_Optimizer\nfrom . import parts\n")
    (folder / "parts.py").write_text("is_real = True\n")
    install_as_apex(device_type="cpu", shadow=True)
    assert importlib.import_module(f"{name}.parts").is_real
    assert importlib.import_module(name).FP16_Optimizer.__module__.startswith("autoamp.")
    assert not hasattr(importlib.import_module("apex.parallel"), "is_real")
    uninstall()
    assert [one for one in sys.modules if one.partition(".")[0] == "apex"] == []


def test_a_module_of_a_hidden_apex_that_cannot_be_imported_tells_the_remedy(importable: Path) -> None:
    (importable / "transformer.py").write_text("raise ImportError('undefined symbol')\n", encoding="utf-8")
    install_as_apex(device_type="cpu", shadow=True)
    with pytest.raises(ImportError, match="undefined symbol") as caught:
        importlib.import_module("apex.transformer")
    (note,) = caught.value.__notes__
    assert note.endswith("Build apex for this torch")


@pytest.mark.parametrize("broken", ["__init__.py", "amp/__init__.py"])
def test_an_apex_with_amp_that_cannot_be_imported_tells_the_remedy_under_the_command(site: Path, broken: str) -> None:
    for name in ("amp/__init__.py", broken):
        (site / "apex" / name).parent.mkdir(exist_ok=True)
        (site / "apex" / name).write_text("raise ImportError('no torch._six')\n" if name == broken else "")
    (site / "program.py").write_text("from apex import amp\n", encoding="utf-8")
    ended = launched(site, {"run": ["run", "--device-type", "cpu", "program.py"]})["run"]
    assert ended.code == 1
    assert "ImportError: no torch._six\nautoamp: a module of the installed apex cannot be imported here." in ended.err
    assert ended.err.count("--shadow-apex, or install_as_apex(shadow=True)") == 1


def test_an_apex_that_has_amp_is_not_hidden_unasked(importable: Path) -> None:
    (importable / "amp.py").write_text("", encoding="utf-8")
    assert "amp" not in added_to_real_apex()
    finders = [*sys.meta_path]
    with pytest.raises(UsageError, match="shadow=True"):
        install_as_apex()
    assert sys.meta_path == finders
    install_as_apex(device_type="cpu", shadow=True)
    assert callable(importlib.import_module("apex.amp").initialize)
