"""What is installed: a wheel's content, an editable install's, and that the files which say how to install agree."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp.core import shipped_table

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_SETS = {path.name for path in (ROOT / "lists").glob("*.toml")}
TORCH = Path(torch.__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

# What a module computes with is seen by a function that autoamp does not cast.
PROGRAM = """\
import torch
class Seen(torch.nn.Linear):
    def forward(self, x):
        return torch.mm(x, x).dtype
print(Seen(2, 2)(torch.ones(2, 2)))
"""
# -S leaves out the environment's own install of autoamp, which may be an editable one of this tree.
READ_LISTS = """
import site, sys
site.addsitedir({site!r})
sys.path.append({dependencies!r})
import torch
before = set(sys.modules)
import autoamp, autoamp.cli, autoamp.exports, autoamp.core
print(autoamp.__file__)
print(*autoamp.core.shipped_sets())
print(*(rule.target for rule in autoamp.core.shipped_table("default").rules))
print(*set(sys.modules) - before)
"""


def run(command: Sequence[str], **options: Any) -> str:
    """Run a command and return what it printed; fail with all of it where the command fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, since a build writes beside it. Without the tools for a build the tests are skipped."""
    for name in ("build", "setuptools", "pip"):
        pytest.importorskip(name)
    left_out = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info", "*.so")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "sources", ignore=left_out))


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and the wheel, built as for a release, without a network."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(sources)])
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has an editable install, and nothing else."""
    python = new_environment(tmp_path_factory)
    isolated = ["--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    run([*PIP, "install", *isolated, "--prefix", str(python.parents[1]), "-e", str(sources)])
    return python


@pytest.fixture(scope="module")
def python(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and nothing else."""
    python = new_environment(tmp_path_factory)
    wheel.extractall(site_of(python))
    return python


def new_environment(folders: pytest.TempPathFactory) -> Path:
    """Return the Python of an empty environment."""
    folder = folders.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    return folder / "bin" / "python"


def site_of(python: Path) -> Path:
    """Return where an environment has its packages."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    return site


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for end in ("py", "pyi") for path in (ROOT / "autoamp").rglob(f"*.{end}")}
    lists = {f"autoamp/lists/{name}" for name in {"__init__.py", *SHIPPED_SETS}}
    lists.add("autoamp/core/torchvision/autoamp.toml")
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "autoamp").rglob("templates/*")}
    assert len(templates) == 3
    assert shipped == {*modules, *templates, "autoamp/py.typed", "autoamp.pth", *lists}
    assert {"default.toml", "apex.toml", "bf16.toml"} <= SHIPPED_SETS
    for name in SHIPPED_SETS:
        assert wheel.read(f"autoamp/lists/{name}") == (ROOT / "lists" / name).read_bytes()


def test_source_distribution_holds_the_tree(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    examples = {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")}
    lists = {f"lists/{name}" for name in ("__init__.py", *SHIPPED_SETS)}
    wanted = {"setup.py", "setup.cfg", "CHANGELOG.md", "docs/lists.md", "docs/howto/index.md", "tests/conftest.py"}
    assert {*wanted, *lists, *examples} <= names


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    # `zipfile.Path` adds folders to the object that it is given, which other tests extract.
    with zipfile.ZipFile(str(wheel.filename)) as own:
        metadata = importlib.metadata.PathDistribution(zipfile.Path(own, name.removesuffix("METADATA"))).metadata
    assert metadata["Name"] == "autoamp"
    assert metadata["Version"] == autoamp.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.11"
    required = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == {"torch>=2.13", "wrapt>=2.5", "numpy", "rich"}
    assert {"test", "examples"} <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.parametrize("kind", ["regular", "editable"])
def test_installed_package_reads_its_lists(python: Path, editable: Path, sources: Path, kind: str) -> None:
    installed = python if kind == "regular" else editable
    script = READ_LISTS.format(site=str(site_of(installed)), dependencies=str(TORCH))
    where, sets, rules, added = run([sys.executable, "-I", "-S", "-c", script]).splitlines()
    assert Path(where).is_relative_to(sources if kind == "editable" else installed.parents[1])
    assert {f"{name}.toml" for name in sets.split()} == SHIPPED_SETS
    assert rules.split() == [rule.target for rule in shipped_table("default").rules]
    # `torch.utils.benchmark` imports `cpp_extension`, which tells of a CUDA build of torch without a CUDA runtime.
    assert "autoamp.tools.tuning" in added.split()
    assert not {"torch.utils.benchmark", "torch.utils.cpp_extension"}.intersection(added.split())


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checkers_find_the_editable_install(editable: Path, sources: Path, tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker)
    # What they can follow: the folder, in a line of a .pth file, and no import hook.
    (pth,) = site_of(editable).glob("__editable__*.pth")
    assert [Path(line).resolve() for line in pth.read_text(encoding="utf-8").split("\n") if line] == [sources]
    assert not list(pth.parent.glob("*finder*"))
    program, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    # By an old name type checkers find a file for them alone, of which pyright would warn.
    text = "# pyright: reportMissingModuleSource=false\nimport autoamp\nimport autoamp.compat.fastai1\n"
    program.write_text(f"{text}import autoamp.apex.optimizers\n", encoding="utf-8")
    wrong.write_text("import autoamp_of_no_one\n", encoding="utf-8")
    command = [sys.executable, "-m", checker]
    if checker == "mypy":
        command += ["--config-file=", "--follow-imports=skip", "--cache-dir", str(tmp_path)]
        command += ["--python-executable", str(editable)]
    else:
        command += ["--level", "error", "--pythonpath", str(editable)]
    run([*command, str(program)])
    assert subprocess.run([*command, str(wrong)], capture_output=True, timeout=300).returncode == 1


# -- the wheel in an environment of its own --


def started(python: Path, folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    # The requirements alone: .pth files on this path are not read.
    given = {**os.environ, "PYTHONPATH": os.pathsep.join({str(TORCH), sysconfig.get_path("purelib")}), **environ}
    return subprocess.run([python, *args], cwd=folder, env=given, capture_output=True, text=True)


@pytest.mark.processes
def test_the_wheel_works_without_the_repository(python: Path, tmp_path: Path) -> None:
    where = started(python, tmp_path, "-c", "import autoamp; print(autoamp.__file__)").stdout
    assert str(ROOT / "autoamp") not in where
    assert started(python, tmp_path, "-m", "autoamp", "--version").stdout.startswith(f"autoamp {autoamp.__version__} ")
    assert "lists/default.toml" in started(python, tmp_path, "-m", "autoamp", "lists").stdout


@pytest.mark.processes
def test_the_environment_turns_on_what_a_program_starts_itself(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    start = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    on = {"AUTOAMP": "1", "AUTOAMP_DEVICE_TYPE": "cpu", "AUTOAMP_DTYPE": "fp16"}
    child = ("-c", start, "program.py")
    assert started(python, tmp_path, *child, **on).stdout == "torch.float16\n"
    assert started(python, tmp_path, *child, **{**on, "AUTOAMP_DTYPE": "bf16"}).stdout == "torch.bfloat16\n"
    assert started(python, tmp_path, *child, **{**on, "AUTOAMP": "0"}).stdout == "torch.float32\n"
    ranks = started(python, tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py", **on)
    assert ranks.stdout == "torch.float16\n" * 2, ranks.stderr
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "program.py")
    if importlib.util.find_spec("accelerate") is not None:
        assert started(python, tmp_path, *launch, **on).stdout == "torch.float16\n"
    # The program prints while pytest collects it.
    collected = started(
        python, tmp_path, "-m", "pytest", "-s", "-q", "--co", "-p", "no:cacheprovider", "program.py", **on
    )
    assert collected.stdout.startswith("torch.float16\n")
    quiet = started(python, tmp_path, "-c", "import sys; print({'torch', 'autoamp'} & set(sys.modules))", **on)
    assert quiet.stdout == "set()\n"
    for variables, message in (
        ({"AUTOAMP_OPT_LEVEL": "O7"}, "AUTOAMP_OPT_LEVEL='O7' is unknown"),
        ({"AUTOAMP_DTYPE": "half"}, "AUTOAMP_DTYPE='half' is not a half-precision dtype"),
        ({"AUTOAMP": "true"}, "expected AUTOAMP=1"),
    ):
        wrong = started(python, tmp_path, "program.py", **{**on, **variables})
        assert (wrong.returncode, wrong.stdout) == (2, "")
        (line,) = wrong.stderr.splitlines()
        assert line.startswith(f"autoamp: {message}")
        assert all(f"{name}={value}" in line for name, value in variables.items())


# -- what the files say --


CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")


def test_every_package_is_named_in_setup_cfg() -> None:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "autoamp").rglob("__init__.py")}
    assert set(CONFIG["options"]["packages"].split()) == found


def test_pyproject_holds_the_build_system_and_what_setup_cfg_cannot_hold() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert (list(settings), list(settings["tool"])) == (["build-system", "tool"], ["ruff"])


def test_constraints_are_exact_and_cover_what_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[0-9][0-9.]*(post[0-9]+)?", version) for version in pins.values())
    # CI does not install what mutation testing takes.
    extras = [block for name, block in CONFIG["options.extras_require"].items() if name != "mutation"]
    wanted = [CONFIG["options"]["install_requires"], *extras]
    names = {re.split(r"[\[<>=]", line)[0] for block in wanted for line in block.split()} - {"autoamp"}
    assert names <= set(pins)


# In the place of the programs that CI calls; none of these does anything.
STUBS = """
for name in pip python ruff mypy chromium chromedriver; do eval "$name() { echo $name \\"\\$@\\"; }"; done
python3() { echo python3 "$@"; mkdir -p .venv/bin; touch .venv/bin/activate; }
"""


@pytest.mark.skipif(sys.platform == "win32", reason="CI is a script of bash")
def test_ci_runs_the_commands_of_the_readme_first(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.split(" && ") for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert [command[1] for command in commands] == [". .venv/bin/activate"] * 2
    wanted = [" ".join(shlex.split(part)) for command in commands for part in command if part != command[1]]
    (tmp_path / "stubs").write_text(STUBS)
    environment = {**os.environ, "BASH_ENV": str(tmp_path / "stubs"), "TMPDIR": str(tmp_path)}
    called = run(["bash", str(ROOT / ".ci" / "run")], env=environment).splitlines()
    assert called[: len(wanted)] == wanted
    # The default suite runs once, and its closing line is the last.
    assert [place for place, line in enumerate(called) if line == "python -m pytest"] == [5, len(called) - 1]
    left_out = re.findall(r"not (\w+)", CONFIG["tool:pytest"]["addopts"])
    asked = {word for line in called if " -m " in line for word in re.split(r"\W+", line)}
    assert {*left_out, "client"} - asked == {"null_cuda"}
    assert {"ruff check .", "ruff format --check ."} <= set(called)
