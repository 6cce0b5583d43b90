"""The sdist and the wheel: built as for a release, installed without the repository, and AUTOAMP=1 there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import autoamp

pytest.importorskip("build")
pytestmark = pytest.mark.processes
ROOT = Path(autoamp.__file__).parents[1]
# What a module computes with is seen by a function that autoamp does not cast.
PROGRAM = """\
import torch
class Seen(torch.nn.Module):
    def forward(self, x):
        return torch.mm(x, x).dtype
print(Seen()(torch.ones(2, 2)))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(ROOT)], check=True)
    return out


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has the wheel, and of the repository nothing."""
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    # Torch and the other requirements; as a path alone, so that .pth files there do not lead to the repository.
    (site / "a_requirements.pth").write_text(_requirements())
    return python


def _requirements() -> str:
    import torch

    return "\n".join({str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib")})


def run(python: Path, folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, *args], cwd=folder, env={**kept, **environ}, capture_output=True, text=True)


def test_the_sdist_has_docs_examples_and_the_changelog(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    examples = {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")}
    wanted = {"CHANGELOG.md", "docs/lists.md", "docs/howto/index.md", "lists/default.toml", "tests/conftest.py"}
    assert {*wanted, *examples} <= names


def test_the_wheel_works_without_the_repository(python: Path, tmp_path: Path) -> None:
    where = run(python, tmp_path, "-c", "import autoamp; print(autoamp.__file__)").stdout
    assert str(ROOT / "autoamp") not in where
    assert run(python, tmp_path, "-m", "autoamp", "--version").stdout.startswith(f"autoamp {autoamp.__version__} ")
    assert "lists/default.toml" in run(python, tmp_path, "-m", "autoamp", "lists").stdout


def test_the_environment_turns_on_what_a_program_starts_itself(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    start = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    on = {"AUTOAMP": "1", "AUTOAMP_DEVICE_TYPE": "cpu", "AUTOAMP_DTYPE": "fp16"}
    child = ("-c", start, "program.py")
    assert run(python, tmp_path, *child, **on).stdout == "torch.float16\n"
    assert run(python, tmp_path, *child, **{**on, "AUTOAMP_DTYPE": "bf16"}).stdout == "torch.bfloat16\n"
    assert run(python, tmp_path, *child, **{**on, "AUTOAMP": "0"}).stdout == "torch.float32\n"
    ranks = run(python, tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py", **on)
    assert ranks.stdout == "torch.float16\n" * 2, ranks.stderr
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "program.py")
    if importlib.util.find_spec("accelerate") is not None:
        assert run(python, tmp_path, *launch, **on).stdout == "torch.float16\n"
    # The program prints while pytest collects it.
    collected = run(python, tmp_path, "-m", "pytest", "-s", "-q", "--co", "-p", "no:cacheprovider", "program.py", **on)
    assert collected.stdout.startswith("torch.float16\n")
    quiet = run(python, tmp_path, "-c", "import sys; print({'torch', 'autoamp'} & set(sys.modules))", **on)
    assert quiet.stdout == "set()\n"
    wrong = run(python, tmp_path, "program.py", **{**on, "AUTOAMP_OPT_LEVEL": "O7"})
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "'O7' is unknown" in wrong.stderr
