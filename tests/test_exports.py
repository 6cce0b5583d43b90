"""`import autoamp` by itself imports nothing; the names come when they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import autoamp
from autoamp import core
from tests.launches import environment

PROBE = """
import sys
import autoamp, autoamp.cli
print(autoamp.__version__, "torch" in sys.modules, hasattr(autoamp, "__wrapped__"), "torch" in sys.modules)
from autoamp import errors, init
print(init is autoamp.core.init, errors is autoamp.errors, "torch" in sys.modules, vars(autoamp)["init"] is init)
from autoamp import *
print(region is autoamp.region, autoamp.optimizers.FusedAdam.__name__)
"""


RUN = """
import sys, torch
before = set(sys.modules)
from autoamp.cli import main
main(["run", "--quiet", "--device-type", "cpu", sys.argv[1]])
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_an_empty_script_under_autoamp_run_imports_little(tmp_path: Path) -> None:
    """Nothing of torch that `import torch` leaves out, such as its compiler; that takes as long again."""
    (tmp_path / "empty.py").touch()
    command = [sys.executable, "-c", RUN, str(tmp_path / "empty.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "autoamp tomllib wrapt\n"


def test_a_script_that_does_not_import_autoamp_has_a_report(tmp_path: Path) -> None:
    """The command composes the handle itself: nobody has asked for a name of `exports`."""
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()\n")
    command = [sys.executable, "-m", "autoamp", "run", "--report", "report.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, (tmp_path / "report.json").exists()) == (0, True), done.stderr


def test_names_are_imported_when_they_are_asked_for() -> None:
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        f"{autoamp.__version__} False False False", "True True True True", "True FusedAdam",
    ]  # fmt: skip


def test_names_are_those_of_the_packages() -> None:
    assert autoamp.init is core.init
    assert {"init", "Handle", "UsageError"} < set(autoamp.__all__)
    assert {"__version__", *autoamp.__all__} <= set(dir(autoamp))
    with pytest.raises(AttributeError, match="module 'autoamp' has no attribute 'intialize'"):
        autoamp.intialize  # noqa: B018
    with pytest.raises(ImportError, match="intialize"):
        from autoamp import intialize  # noqa: F401
