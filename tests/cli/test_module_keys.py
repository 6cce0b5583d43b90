"""Keys under `[modules]` of list files, in programs that `autoamp run` runs and in scripts that call `init`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launches import Ended, launched, plainly, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

NET = """
import torch
class RMS(torch.nn.Module):
    def forward(self, x):
        self.computed = (x @ x.T).dtype
        return x
def local():
    class Local(RMS):
        pass
    return Local()
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(8, 8), RMS(), local())
def main():
    model = Net()
    model(torch.ones(2, 8))
    print(model[1].computed, model[2].computed, flush=True)
"""

SCRIPTS = {
    "net.py": NET,
    "script.py": f"{NET}\nif __name__ == '__main__':\n    main()\n",
    "spawns.py": f"""{NET}
if __name__ == '__main__':
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=main)
    child.start(), child.join()
""",
    "calls_init.py": f"""
import sys, autoamp
autoamp.init(device_type="cpu", lists=sys.argv[1])
{NET}
main()
""",
    # A module that calls `init` before its own classes are there.
    "early.py": f"import autoamp\nautoamp.init(device_type='cpu', lists='early.toml')\n{NET}\nmain()\n",
    "imports_early.py": "import early\n",
}


def listed(*keys: str) -> str:
    """Return a list file by which these modules run in fp32."""
    return "\n".join(["schema = 1", "[modules]", *(f'"{key}" = "fp32"' for key in keys)])


LISTS = {
    "rms.toml": listed("__main__.RMS"),
    "local.toml": listed("__main__.local.<locals>.Local"),
    "early.toml": listed("early.RMS"),
}
RUN = ["run", "--dtype", "bf16", "--device-type", "cpu"]
RUNS = {
    "script": [*RUN, "--lists", "rms.toml", "script.py"],
    "module": [*RUN, "--lists", "rms.toml", "-m", "script"],
    "spawned": [*RUN, "--lists", "rms.toml", "spawns.py"],
    "local": [*RUN, "--lists", "local.toml", "script.py"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    return written(tmp_path_factory.mktemp("programs"), {**SCRIPTS, **LISTS})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line of RUNS."""
    return launched(folder, RUNS)


@pytest.mark.parametrize("how", ["script", "module", "spawned"])
def test_a_class_of_the_script_itself_runs_as_listed(how: str, ended: dict[str, Ended]) -> None:
    assert (ended[how].code, ended[how].out) == (0, "torch.float32 torch.float32\n"), ended[how].err


def test_a_class_within_a_function_runs_as_listed(ended: dict[str, Ended]) -> None:
    assert (ended["local"].code, ended["local"].out) == (0, "torch.bfloat16 torch.float32\n"), ended["local"].err


@pytest.mark.parametrize("argv", [("calls_init.py", "rms.toml"), ("imports_early.py",)], ids=str)
def test_a_class_that_comes_after_init_runs_as_listed(argv: tuple[str, ...], folder: Path) -> None:
    one = plainly(folder, *argv)
    assert (one.code, one.out) == (0, "torch.float32 torch.float32\n"), one.err
