"""Keys under `[modules]` of list files, in programs that `autoamp run` runs and in scripts that call `init`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.launches import Ended, launched, written

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
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
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
    "trains.py": "import net\nnet.train(net.Net())\n",
    "steps.py": f"""
import sys, autoamp
autoamp.init(device_type="cpu", lists=sys.argv[1])
import net
{NET}
train(Net())
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
    "wrong.toml": "schema = 1\nfp32 = ['nett.losses.focal']\n[modules]\n"
    + "\n".join(f'"{key}" = "fp32"' for key in ("net.RNS", "RMS", "9", "1", "*.attention", "net.Net", "net.RMS")),
    "typo.toml": listed("__main__.RNS", "net.RNS", "__main__.RMS"),
}
RUN = ["run", "--dtype", "bf16", "--device-type", "cpu"]
RUNS = {
    "script": [*RUN, "--lists", "rms.toml", "script.py"],
    "module": [*RUN, "--lists", "rms.toml", "-m", "script"],
    "spawned": [*RUN, "--lists", "rms.toml", "spawns.py"],
    "wrong": [*RUN, "--report", "wrong.json", "--lists", "wrong.toml", "trains.py"],
    "local": [*RUN, "--lists", "local.toml", "script.py"],
    "calls init": ["python", "calls_init.py", "rms.toml"],
    "imports early": ["python", "imports_early.py"],
    "typo": ["python", "steps.py", "typo.toml"],
}


def short(one: Ended) -> str:
    """Return what a program said on standard error, with lines joined and files without their folders."""
    return re.sub(r"[^(\s]*/(?=\w+\.toml)", "", " ".join(one.err.split())).replace("( ", "(")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    return written(tmp_path_factory.mktemp("programs"), {**SCRIPTS, **LISTS})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line of RUNS."""
    return launched(folder, RUNS)


@pytest.mark.parametrize("how", ["script", "module", "spawned", "calls init", "imports early"])
def test_a_class_of_the_script_itself_runs_as_listed(how: str, ended: dict[str, Ended]) -> None:
    assert (ended[how].code, ended[how].out) == (0, "torch.float32 torch.float32\n"), ended[how].err


def test_a_class_within_a_function_runs_as_listed(ended: dict[str, Ended]) -> None:
    assert (ended["local"].code, ended["local"].out) == (0, "torch.bfloat16 torch.float32\n"), ended["local"].err


def test_what_matched_nothing_is_told_with_the_nearest_name(ended: dict[str, Ended]) -> None:
    assert ended["wrong"].code == 0
    said = short(ended["wrong"])
    assert "'net.RNS' (wrong.toml:4) names no class; did you mean 'net.RMS'?" in said
    assert "'RMS' (wrong.toml:5) is the path of no module that was called; did you mean 'net.RMS'?" in said
    assert "'9' (wrong.toml:6) is the path of no module that was called" in said
    assert "'*.attention' (wrong.toml:8) is the path" in said
    assert "'nett.losses.focal' (wrong.toml:2) names nothing that was imported" in said
    assert "net.Net" not in said
    assert "'net.RMS' (" not in said


def test_the_report_has_what_matched_nothing(folder: Path, ended: dict[str, Ended]) -> None:
    document = json.loads((folder / "wrong.json").read_text())
    run = document["runs"][0] if "runs" in document else document
    assert set(run["unmatched"]) == {"net.RNS", "RMS", "9", "*.attention", "nett.losses.focal"}


def test_what_a_child_matched_is_not_told(ended: dict[str, Ended]) -> None:
    assert "the processes that it started are not counted" in short(ended["spawned"])
    assert "RMS" not in short(ended["spawned"])


def test_a_wrong_class_is_told_once_at_the_first_step(ended: dict[str, Ended]) -> None:
    one = ended["typo"]
    assert one.code == 0, one.err
    assert one.err.count("'__main__.RNS' under modules names no class") == 1
    assert "did you mean '__main__.RMS'?" in one.err
    assert "'net.RNS' under modules names no class" in one.err
    assert one.err.count("UserWarning") == 2
    assert "steps.py:" in one.err
