"""What is installed: a wheel's content, an editable install's, and that the files which say how to install agree."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import autoamp
from autoamp.rules import shipped_table

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_SETS = {path.name for path in (ROOT / "lists").glob("*.toml")}
# Beside the package: the command, and what Python reads at its start.
TOP_LEVEL = ("autoamp_command.py", "autoamp_startup.py", "autoamp.pth")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

needs_build_tools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None,
    reason="a wheel is built by setuptools and pip",
)


def run(command: Sequence[str]) -> str:
    """Run a command and return what it printed; fail with all of it where the command fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, since a build writes beside it; with tests, which are not to be shipped."""
    target = tmp_path_factory.mktemp("sources")
    for name in ("autoamp", "lists", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", *TOP_LEVEL):
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without a network."""
    target = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(target), str(sources)])
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@needs_build_tools
def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "autoamp").rglob("*.py")}
    lists = {f"autoamp/lists/{name}" for name in {"__init__.py", *SHIPPED_SETS}}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "autoamp").rglob("templates/*")}
    assert len(templates) == 3
    assert shipped == {*modules, *templates, "autoamp/py.typed", *TOP_LEVEL, *lists}


@needs_build_tools
def test_source_distribution_holds_the_lists(sources: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sources, tmp_path / "sources")
    script = "import setuptools.build_meta as build; print(build.build_sdist('dist'))"
    name = subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True, text=True).stdout
    with tarfile.open(copy / "dist" / name.splitlines()[-1]) as archive:
        members = {"/".join(Path(member).parts[1:]) for member in archive.getnames()}
    assert {"setup.py", "setup.cfg", *(f"lists/{name}" for name in ("__init__.py", *SHIPPED_SETS))} <= members


@needs_build_tools
def test_wheel_lists_are_those_of_the_tree(wheel: zipfile.ZipFile) -> None:
    assert {"default.toml", "apex.toml", "bf16.toml"} <= SHIPPED_SETS
    for name in SHIPPED_SETS:
        assert wheel.read(f"autoamp/lists/{name}") == (ROOT / "lists" / name).read_bytes()


@needs_build_tools
def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = importlib.metadata.PathDistribution(zipfile.Path(wheel, name.removesuffix("METADATA"))).metadata
    assert metadata["Name"] == "autoamp"
    assert metadata["Version"] == autoamp.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.11"
    required = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == {"torch>=2.13", "wrapt>=2.5", "numpy", "rich"}
    assert {"test", "examples"} <= set(metadata.get_all("Provides-Extra"))


READ_LISTS = """
import site, sys
site.addsitedir({site!r})
sys.path.append({dependencies!r})
import autoamp, autoamp.rules
print(autoamp.__file__)
print(*autoamp.rules.shipped_sets())
print(*(rule.target for rule in autoamp.rules.shipped_table("default").rules))
"""


@needs_build_tools
@pytest.mark.parametrize("editable", [False, True], ids=["regular", "editable"])
def test_installed_package_reads_its_lists(sources: Path, tmp_path: Path, editable: bool) -> None:
    what = ["-e", str(sources)] if editable else [str(sources)]
    isolated = ["--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    run([*PIP, "install", *isolated, "--prefix", str(tmp_path), *what])
    (site,) = {path.parent for path in tmp_path.rglob("autoamp-*.dist-info")}
    # -S leaves out the environment's own install of autoamp, which may be an editable one of this tree.
    script = READ_LISTS.format(site=str(site), dependencies=sysconfig.get_path("purelib"))
    where, sets, rules = run([sys.executable, "-I", "-S", "-c", script]).splitlines()
    assert Path(where).is_relative_to(sources if editable else tmp_path)
    assert {f"{name}.toml" for name in sets.split()} == SHIPPED_SETS
    assert rules.split() == [rule.target for rule in shipped_table("default").rules]
    if editable:
        # What type checkers and editors can follow: the folder, in a line of a .pth file, and no import hook.
        (pth,) = site.glob("*autoamp*.pth")
        assert [Path(line).resolve() for line in pth.read_text(encoding="utf-8").split("\n") if line] == [sources]
        assert not list(site.glob("*finder*"))


@needs_build_tools
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checkers_find_the_editable_install(sources: Path, tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker)
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    isolated = ["--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    run([*PIP, "install", *isolated, "--prefix", str(environment), "-e", str(sources)])
    program, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    program.write_text("import autoamp\nimport autoamp.compat.fastai1\n", encoding="utf-8")
    wrong.write_text("import autoamp_of_no_one\n", encoding="utf-8")
    command = [sys.executable, "-m", checker]
    if checker == "mypy":
        command += [
            "--config-file=",
            "--follow-imports=skip",
            "--cache-dir",
            str(tmp_path),
            "--python-executable",
            python,
        ]
    else:
        command += ["--level", "error", "--pythonpath", python]
    run([*command, str(program)])
    assert subprocess.run([*command, str(wrong)], capture_output=True, timeout=300).returncode == 1


def test_every_package_is_named_in_setup_cfg() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "autoamp").rglob("__init__.py")}
    assert set(config["options"]["packages"].split()) == found


def test_pyproject_holds_the_build_system_alone() -> None:
    assert list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))) == ["build-system"]


def test_constraints_are_exact_and_cover_what_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[0-9][0-9.]*(post[0-9]+)?", version) for version in pins.values())
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    # CI does not install what mutation testing takes.
    extras = [block for name, block in config["options.extras_require"].items() if name != "mutation"]
    wanted = [config["options"]["install_requires"], *extras]
    names = {re.split(r"[\[<>=]", line)[0] for block in wanted for line in block.split()} - {"autoamp"}
    assert names <= set(pins)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    prepare, _, install_and_test = commands[1].partition(" && . .venv/bin/activate && ")
    assert prepare == "python3 -m venv .venv"
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1].replace("pip install -q ", "pip install ") == install_and_test


def test_the_import_leaves_out_what_looks_for_compilers_and_cuda() -> None:
    """`torch.utils.benchmark` imports `cpp_extension`, which tells of a CUDA build of torch without a CUDA runtime."""
    asked = "import sys, torch; there = set(sys.modules); import autoamp, autoamp.cli; print(*set(sys.modules) - there)"
    added = run([sys.executable, "-c", asked]).split()
    assert "autoamp.tuning" in added
    assert not {"torch.utils.benchmark", "torch.utils.cpp_extension"}.intersection(added)
