"""The core without the other floors: a copy of the package without apex, tools and cli passes the core's tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What these files need is on another floor: levels, what looks on, the command.
ELSEWHERE = re.compile(
    r"autoamp\.(apex|tools|cli|compat|diagnostics|optimizers|parallel|normalization|fp16_utils|tuning)\b|tests\.(apex|tools|cli)\b"
    r"|\binitialize\(|\bFP16_Optimizer\b|autoamp\.(scale_loss|state_dict|load_state_dict|master_params)\b"
    r"|\.(stats|overflows|last_overflow|observe|count|trace|profile_ranges|record|report|explain|consistency|postfix|log_to"
    r"|follow|explain_overflow)\b(?!_)|trace_overflow|\bmain\(|\"run\"|tests\.launches|stepping\.networks|deferred_targets"
)
NAMES = {"BaseHandle", "Handle", "NoOpHandle", "current_handle", "init", "region"}


def core_tests() -> list[Path]:
    """Return the files of tests/core that need the core alone."""
    files = sorted((ROOT / "tests" / "core").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in files if not ELSEWHERE.search(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package without the other floors, its lists, and the tests."""
    place = tmp_path_factory.mktemp("alone")
    ignored = shutil.ignore_patterns("__pycache__", "apex", "tools", "cli", "compat")
    shutil.copytree(ROOT / "autoamp", place / "autoamp", ignore=ignored)
    for folder in ("lists", "tests"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", place)
    lines = (ROOT / "autoamp" / "exports.py").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.startswith(("from autoamp.core", "from autoamp.errors"))]
    kept += [f"from autoamp.core import {name} as {name}" for name in sorted(NAMES)]
    (place / "autoamp" / "exports.py").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return place


@pytest.mark.processes
def test_the_tests_of_the_core_pass_without_the_other_floors(alone: Path) -> None:
    files = core_tests()
    assert len(files) >= 30
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(alone), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_thing_of_the_core_works_alone(alone: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(alone), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=alone, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


PROGRAM = """
import sys
import torch, autoamp
from autoamp.core import StepGuard, runtime_of
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)), torch.randn(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"fp32": ["tanh"]})
assert model(x).dtype is torch.float16 and torch.tanh(x.half()).dtype is torch.float32
with handle.scale_loss(model(x).float().mean() * 1e36, optimizer) as scaled:
    scaled.backward()
before = model[0].weight.detach().clone()
optimizer.step()
assert handle.last_step_skipped and torch.equal(before, model[0].weight)
optimizer.zero_grad()
with handle.scale_loss(model(x).float().mean(), optimizer) as scaled:
    scaled.backward()
optimizer.step()
assert not torch.equal(before, model[0].weight) and handle.skipped_steps == 1
handle.load_state_dict(handle.state_dict())
with handle.override(model[2], "fp32"):
    assert model(x).dtype is torch.float32
with handle.disable_casts():
    assert model(x).dtype is torch.float32
with torch.no_grad(), handle.inference(model):
    assert model(x).dtype is torch.float16
half = nn.Linear(4, 1).half()
masters = torch.optim.SGD(half.parameters(), lr=0.01)
runtime_of(handle).optimizers.keep_masters(masters)
assert {param.dtype for group in masters.param_groups for param in group["params"]} == {torch.float32}
handle.deactivate()
assert model(x).dtype is torch.float32
with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
    assert model(x).dtype is torch.bfloat16
handle = autoamp.init(device_type="cpu", dtype=torch.float16, scope="modules")
with handle.auto_scale():
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
handle.deactivate()
assert not any(name.startswith(("autoamp.apex", "autoamp.tools", "autoamp.cli")) for name in sys.modules)
print("done")
"""
