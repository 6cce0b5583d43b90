"""Type checkers resolve autoamp, infer what users' programs get, and flag what is wrong in them."""

from __future__ import annotations

import configparser
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp import core
from autoamp.tools.typed import ByName

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs.py"


@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    settings = {
        "include": [str(PROGRAMS)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": True,
        # A wrong line that is not flagged is an error.
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout


def test_mypy_reads_the_programs_too() -> None:
    # CI's `mypy` does so. Strict, an ignore comment that is not needed is an error: what is wrong has to be flagged.
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert str(PROGRAMS.relative_to(ROOT)) in config["mypy"]["files"].split(", ")
    assert config["mypy"].getboolean("strict")


def test_what_type_checkers_read_of_init_is_what_it_takes() -> None:
    taken = inspect.signature(core.init).parameters.values()
    by_name = {one.name: one.annotation for one in taken if one.kind is one.KEYWORD_ONLY}
    assert {name: of.__forward_arg__ for name, of in ByName.__annotations__.items()} == by_name
