"""Lists that installed packages ship, by real packages in a folder on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIST = """\
schema = 1
fp16 = ["mylib.product"]

[modules]
"mylib.Norm" = "fp32"
"""

PROGRAM = """\
import torch, autoamp
autoamp.init(device_type="cpu", dtype=torch.float16)
import sys
assert "mylib" not in sys.modules
import mylib
print(mylib.product(torch.ones(2, 2)), mylib.Norm()(torch.ones(2).half()).dtype)
"""


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


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )


def test_a_package_brings_the_rules_of_its_own_ops(tmp_path: Path) -> None:
    install(tmp_path, LIST)
    ran = run(tmp_path, "-c", PROGRAM)
    assert (ran.stdout, ran.stderr) == ("torch.float16 torch.float32\n", "")
    shown = run(tmp_path, "-m", "autoamp", "lists").stdout
    file = tmp_path / "mylib" / "autoamp.toml"
    assert [line.split() for line in shown.splitlines() if "mylib" in line] == [
        ["mylib.product", "fp16", f"{file}:2"],
        ["mylib.Norm", "fp32", f"{file}:5"],
        ["my-library", "1.2", str(file)],
    ]


def test_the_project_and_an_explicit_choice_precede_the_lists_of_packages(tmp_path: Path) -> None:
    install(tmp_path, LIST)
    alone = PROGRAM.replace("dtype=", 'lists={"extends": []}, dtype=')
    assert run(tmp_path, "-c", alone).stdout == "torch.float32 torch.float16\n"
    (tmp_path / "autoamp.toml").write_text('schema = 1\nnone = ["mylib.product"]')
    assert run(tmp_path, "-c", PROGRAM).stdout == "torch.float32 torch.float32\n"


@pytest.mark.parametrize(
    ("rules", "package", "why"),
    [
        ("schema = 1\nfp16 = ['softmax']", "mylib", "autoamp.toml:2: 'softmax' is none of the package's own"),
        ("schema = 1\nextends = []", "mylib", "autoamp.toml:2: a package's list cannot choose the base"),
        ("schema = 1\nfp16 = 3", "mylib", "autoamp.toml:2: "),
        (LIST, "absent", "no package 'absent' is installed"),
        (LIST, "mylib.inner", "'mylib.inner' has no list"),
    ],
)
def test_a_broken_list_is_told_and_left_out(tmp_path: Path, rules: str, package: str, why: str) -> None:
    install(tmp_path, rules, package)
    ran = run(tmp_path, "-c", PROGRAM)
    assert ran.stdout == "torch.float32 torch.float16\n"
    assert "the cast list of my-library 1.2 is left out: " in ran.stderr
    assert why in ran.stderr


def test_a_name_that_the_package_no_longer_has_is_told_once_it_is_imported(tmp_path: Path) -> None:
    install(tmp_path, 'schema = 1\nfp16 = ["mylib.gone", "mylib.product"]')
    ran = run(tmp_path, "-c", PROGRAM)
    assert ran.stdout == "torch.float16 torch.float16\n"
    assert "'mylib.gone' names nothing" in ran.stderr
