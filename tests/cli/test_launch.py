"""Launching: under `autoamp run` a program finds the world that plain Python gives it, and its children do too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launches import Ended, launched, plainly, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

SCRIPTS = {
    "world.py": """
import json, sys
import helper
import __main__
flags = {name for name in dir() if name.startswith("__")}
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "doc": __doc__, "main": vars(__main__) is globals(), "flags": sorted(flags),
    "builtins": __builtins__ is sys.modules["builtins"], "helper": helper.__name__,
    "annotations": __annotations__ if "__annotations__" in globals() else None,
}))
""",
    "helper.py": "",
    "x.ipynb": '{"cells": []}',
    "package/__init__.py": "",
    "package/__main__.py": "import sys\nprint(sys.argv, __name__, __package__, __spec__.name, __file__)\n",
    "broken/__init__.py": "import no_such_dependency\n",
    "broken/part.py": "",
    # Without a guard by __name__: multiprocessing imports no __main__ of a package.
    "spawns/__init__.py": "",
    "spawns/__main__.py": """
import math, multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(pool.map(math.sqrt, [4, 9]))
""",
    "fails.py": "def f():\n    raise ValueError('wrong') from KeyError('cause')\n\nf()\n",
    "syntax.py": "x = (\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "says.py": "import sys\nsys.exit('goodbye')\n",
    "interrupted.py": """
import os, signal, time
# As Python has it, but where whoever started the tests ignores the signal, as a shell does for what it puts behind.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(30)
""",
    "computes.py": """
import signal, torch

signal.signal(signal.SIGINT, signal.default_int_handler)
torch.nn.Linear(2, 2)(torch.ones(1, 2))
signal.raise_signal(signal.SIGINT)
""",
    "terminated.py": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(30)\n",
    "cleans_up.py": "import atexit\natexit.register(print, 'at exit')\nprint('done')\n",
    "children.py": """
import multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

CALLS = []

class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        import apex
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(layer.weight)
        half = layer(torch.full((2, 2), 1.001))[0, 0].item() == 2  # rounded to bf16
        ours = "autoamp" in apex.__file__
        return torch.tensor([i * i, half, ours, os.getpid() != PARENT, __name__ != "__main__"])

PARENT = int(os.environ.setdefault("PARENT_PID", str(os.getpid())))

if __name__ == "__main__":
    import json
    found = {}
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
        found[method] = torch.cat(list(loader)).tolist()
    print(json.dumps(found))
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs lie."""
    return written(tmp_path_factory.mktemp("programs"), SCRIPTS)


RUNS: dict[str, list[str]] = {
    "world": ["run", "--quiet", "world.py", "--dtype", "a b", "-m", "--"],
    "module": ["run", "--quiet", "-m", "world", "x"],
    "package": ["run", "--quiet", "-m", "package", "--lists", "y"],
    "directory": ["run", "--quiet", "package"],
    "spawns": ["run", "--quiet", "-m", "spawns"],
    "broken": ["run", "--quiet", "-m", "broken.part"],
    **{name: ["run", "--quiet", f"{name}.py"] for name in
       ("fails", "syntax", "exits", "says", "interrupted", "terminated", "cleans_up")},
    "computes": ["run", "--quiet", "--report", "page.html", "computes.py"],
    "children": ["run", "--quiet", "--dtype", "bf16", "--device-type", "cpu", "children.py"],
    "no_script": ["run", "--quiet", "no_such.py"],
    "no_module": ["run", "--quiet", "-m", "no_such.module"],
    "relative": ["run", "--quiet", "-m", ".module"],
    "notebook": ["run", "--quiet", "x.ipynb"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every program of RUNS under `autoamp run`."""
    return launched(folder, RUNS)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("world", ["world.py", "--dtype", "a b", "-m", "--"]),
        ("module", ["-m", "world", "x"]),
        ("package", ["-m", "package", "--lists", "y"]),
        ("spawns", ["-m", "spawns"]),
    ],
)
def test_program_finds_what_it_finds_under_plain_python(
    name: str, argv: list[str], folder: Path, ended: dict[str, Ended]
) -> None:
    expected = plainly(folder, *argv)
    assert expected.code == 0
    assert ended[name] == expected


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("fails", 1), ("exits", 3), ("says", 1), ("interrupted", -signal.SIGINT), ("computes", -signal.SIGINT),
        ("terminated", -signal.SIGTERM), ("cleans_up", 0), ("syntax", 1),
    ],
)  # fmt: skip
def test_program_ends_as_under_plain_python(name: str, code: int, folder: Path, ended: dict[str, Ended]) -> None:
    expected = plainly(folder, f"{name}.py")
    assert ended[name] == expected
    assert expected.code == code


def test_workers_that_are_forked_or_spawned_cast_and_find_the_alias(ended: dict[str, Ended]) -> None:
    assert ended["children"].code == 0, ended["children"].err
    found = json.loads(ended["children"].out)
    assert found["spawn"] == [[i * i, 1, 1, 1, 1] for i in range(4)]
    assert found["fork"] == [[i * i, 1, 1, 1, 0] for i in range(4)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_script", "can't open file 'no_such.py'"),
        ("no_module", "no module named 'no_such.module'"),
        ("relative", "no module named '.module'"),
        ("notebook", "jupyter nbconvert --to script x.ipynb"),
        ("directory", "give the path of a script, or -m a module"),
    ],
)
def test_nothing_to_run_is_told_in_one_line(name: str, said: str, ended: dict[str, Ended]) -> None:
    assert ended[name].code == 2
    assert ended[name].err.startswith("autoamp: ")
    assert ended[name].err.count("\n") == 1
    assert said in ended[name].err


def test_what_a_package_misses_is_named(ended: dict[str, Ended]) -> None:
    assert ended["broken"].code == 1
    assert ended["broken"].err.endswith("ModuleNotFoundError: No module named 'no_such_dependency'\n")
