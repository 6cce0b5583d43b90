"""Lists that installed packages ship, by real packages in a folder on Python's path."""

from __future__ import annotations

import importlib
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import main

LIST = """\
schema = 1
fp16 = ["mylib.product"]

[modules]
"mylib.Norm" = "fp32"
"""

Dtypes = tuple[torch.dtype, torch.dtype]


@pytest.fixture
def dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Dtypes]]:
    """Return what tells the dtypes of an op and of a module of `mylib`, imported after `init()` with these settings."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def found(**settings: object) -> Dtypes:
        autoamp.init(device_type="cpu", dtype=torch.float16, **settings)  # type: ignore[arg-type]
        assert "mylib" not in sys.modules
        mylib = importlib.import_module("mylib")
        return mylib.product(torch.ones(2, 2)), mylib.Norm()(torch.ones(2).half()).dtype

    yield found
    sys.modules.pop("mylib", None)


def install(folder: Path, rules: str, package: str = "mylib") -> None:
    (folder / "mylib").mkdir()
    (folder / "mylib" / "autoamp.toml").write_text(rules)
    (folder / "mylib" / "__init__.py").write_text(
        "import torch\n"
        "def product(x):\n    return x.dtype\n"
        "class Norm(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    )
    info = folder / "my_library-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-library\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[autoamp.lists]\nrules = {package}\n")


def test_a_package_brings_the_rules_of_its_own_ops(
    dtypes: Callable[..., Dtypes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, LIST)
    assert dtypes() == (torch.float16, torch.float32)
    assert main(["lists"]) == 0
    file = tmp_path / "mylib" / "autoamp.toml"
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "mylib" in line] == [
        ["mylib.product", "bf16", f"{file}:2"],
        ["mylib.Norm", "fp32", f"{file}:5"],
        ["my-library", "1.2", str(file)],
    ]


def test_explicit_choices_and_the_project_precede_the_lists_of_packages(
    dtypes: Callable[..., Dtypes], tmp_path: Path
) -> None:
    install(tmp_path, LIST)
    (tmp_path / "autoamp.toml").write_text('schema = 1\nnone = ["mylib.product"]')
    assert dtypes() == (torch.float32, torch.float32)
    sys.modules.pop("mylib")
    assert dtypes(lists={"extends": []}) == (torch.float32, torch.float16)


@pytest.mark.parametrize(
    ("rules", "package", "why"),
    [
        ("schema = 1\nfp16 = ['softmax']", "mylib", "autoamp.toml:2: 'softmax' is not a name of this package"),
        ("schema = 1\nextends = []", "mylib", "autoamp.toml:2: a package's list cannot have `extends`"),
        ("schema = 1\nfp16 = 3", "mylib", "autoamp.toml:2: "),
        (LIST, "absent", "the autoamp.toml of 'absent' cannot be read"),
        (LIST, "by_hand", "the autoamp.toml of 'by_hand' cannot be read"),
        (LIST, "mylib.inner", "the autoamp.toml of 'mylib.inner' cannot be read"),
    ],
)
def test_a_broken_list_is_told_and_left_out(
    dtypes: Callable[..., Dtypes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, package: str, why: str
) -> None:
    # It names no file: its `__spec__` is None.
    monkeypatch.setitem(sys.modules, "by_hand", types.ModuleType("by_hand"))
    install(tmp_path, rules, package)
    with pytest.warns(UserWarning, match="the cast list of my-library 1.2 is ignored: ") as told:
        assert dtypes() == (torch.float32, torch.float16)
    assert why in str(told[0].message)


def test_a_name_that_the_package_no_longer_has_is_told_once_it_is_imported(
    dtypes: Callable[..., Dtypes], tmp_path: Path
) -> None:
    install(tmp_path, 'schema = 1\nfp16 = ["mylib.gone", "mylib.product"]')
    with pytest.warns(UserWarning, match="'mylib.gone' names nothing"):
        assert dtypes() == (torch.float16, torch.float16)


def test_ops_of_a_package_may_be_those_that_it_registers_with_torch(tmp_path: Path) -> None:
    install(tmp_path, 'schema = 1\nfp16 = ["torch.ops.mylib.product"]')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.chdir(tmp_path)
        with torch.library._scoped_library("mylib", "DEF") as library:
            library.define("product(Tensor x) -> Tensor")
            library.impl("product", torch.clone, "CompositeExplicitAutograd")
            autoamp.init(device_type="cpu", dtype=torch.float16)
            assert torch.ops.mylib.product(torch.ones(2)).dtype is torch.float16


def test_the_list_for_torchvision_is_in_force_where_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchvision" / "ops").mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").touch()
    names = shipped_data_of_torchvision()["fp32"]
    functions = "".join(f"def {name.rpartition('.')[2]}(x):\n    return x.dtype\n" for name in names)
    (tmp_path / "torchvision" / "ops" / "__init__.py").write_text(functions)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    autoamp.init(device_type="cpu", dtype=torch.float16)
    ops = importlib.import_module("torchvision.ops")
    assert len(names) > 6
    for name in names:
        assert getattr(ops, name.rpartition(".")[2])(torch.ones(2).half()) is torch.float32
    assert main(["lists", "torchvision.ops.nms"]) == 0
    assert "core/torchvision/autoamp.toml:" in capsys.readouterr().out
    for name in ("torchvision.ops", "torchvision"):
        sys.modules.pop(name)


def shipped_data_of_torchvision() -> dict[str, list[str]]:
    file = Path(autoamp.__file__).parent / "core" / "torchvision" / "autoamp.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
