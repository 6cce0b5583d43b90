"""No half precision without units: on this CPU in processes of their own, on other devices as torch tells of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.half_units import has_units
from tests.launches import ROOT

SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
seen = []
model.register_forward_hook(lambda module, args, out: seen.append(torch.relu(out @ out.T).dtype))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.Sequential(model)(torch.ones(4, 8)).sum().backward()
optimizer.step()
print(seen[0])
"""
INIT = """
import autoamp, torch
dtype = {dtype}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = autoamp.init(dtype=dtype)
with handle.scale_loss(model(torch.ones(4, 8)).float().sum(), optimizer) as loss:
    loss.backward()
optimizer.step()
print((model(torch.ones(4, 8))).dtype)
model, optimizer = autoamp.initialize(model, optimizer, opt_level="O2", dtype=dtype)
print(model.weight.dtype)
with autoamp.region(loss_scale=1.0, **({{}} if dtype is None else {{"dtype": dtype}})):
    print((torch.ones(4, 8) @ torch.ones(8, 4)).dtype)
"""
REAL_BF16 = torch.cpu.get_capabilities().get("avx512_bf16")


def ended(folder: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does, on the units that the machine has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOAMP")}
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder,
        # Two threads wait for each other on a busy machine, which makes a short product as slow as a long one.
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ONEDNN_MAX_CPU_ISA is tested on Linux")
@pytest.mark.skipif("x86" not in torch.cpu.get_capabilities()["architecture"], reason="AVX2 is of x86")
def test_without_units_a_program_runs_in_fp32_and_is_told_so_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "own.py").write_text(INIT.format(dtype=None), encoding="utf-8")
    done = ended(tmp_path, "-m", "autoamp", "run", "--quiet", "script.py", ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.stdout == "torch.float32\n"
    (line,) = done.stderr.splitlines()
    assert "no bf16 units (ONEDNN_MAX_CPU_ISA=AVX2)" in line
    assert "--dtype bf16" in line
    own = ended(tmp_path, "own.py", ONEDNN_MAX_CPU_ISA="AVX2")
    assert own.stdout.split() == ["torch.float32"] * 3
    doctor = ended(tmp_path, "-m", "autoamp", "doctor", "--quick", ONEDNN_MAX_CPU_ISA="AVX2")
    assert "no bf16 units (ONEDNN_MAX_CPU_ISA=AVX2)" in doctor.stdout
    assert "float32; float32 for `autoamp run`" in doctor.stdout


@pytest.mark.skipif(not REAL_BF16, reason="this CPU has no bf16 units")
def test_with_units_the_default_is_bf16_and_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = ended(tmp_path, "-m", "autoamp", "run", "--quiet", "script.py")
    assert (done.stdout, done.stderr) == ("torch.bfloat16\n", "")


@pytest.mark.skipif("x86" not in torch.cpu.get_capabilities()["architecture"], reason="AVX2 is of x86")
def test_a_named_dtype_without_units_is_taken_and_warned_of_once_with_a_factor(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "own.py").write_text(INIT.format(dtype="torch.bfloat16"), encoding="utf-8")
    argv = ("-m", "autoamp", "run", "--quiet", "--dtype", "bf16", "script.py")
    done = ended(tmp_path, *argv, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.stdout == "torch.bfloat16\n"
    own = ended(tmp_path, "own.py", ONEDNN_MAX_CPU_ISA="AVX2")
    assert own.stdout.split() == ["torch.bfloat16"] * 3
    for run in (done, own):
        assert run.stderr.count("times as long as in fp32") == 1
        assert "enabled=False" in run.stderr


@pytest.fixture
def as_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What torch tells of the machine decides."""
    monkeypatch.delenv("AUTOAMP_HALF_UNITS")
    return monkeypatch


@pytest.mark.parametrize(
    ("told", "units"),
    [
        ({"architecture": "arm64", "bf16": False, "fp16_arith": True, "i8mm": False}, {torch.float16}),
        ({"architecture": "arm64", "bf16": True, "fp16_arith": True, "i8mm": True}, {torch.float16, torch.bfloat16}),
        ({"architecture": "arm64", "bf16": False, "fp16_arith": False, "i8mm": False}, set()),
        ({"architecture": "riscv"}, set()),
    ],
)
def test_units_of_an_arm_cpu(
    told: dict[str, object], units: set[torch.dtype], as_the_machine_is: pytest.MonkeyPatch
) -> None:
    as_the_machine_is.setattr(torch.cpu, "get_capabilities", lambda: told)
    as_the_machine_is.setattr("autoamp.half_units.mkldnn.has_bf16", lambda: bool(told.get("bf16")))
    assert {dtype for dtype in (torch.float16, torch.bfloat16) if has_units(dtype, "cpu")} == units
    handle = autoamp.init(device_type="cpu")
    assert handle.is_active() == (torch.bfloat16 in units)


@pytest.mark.parametrize(
    ("capability", "units"),
    [((6, 1), set()), ((7, 5), {torch.float16}), ((8, 0), {torch.float16, torch.bfloat16})],
)
def test_units_of_a_gpu_that_is_in_use(
    capability: tuple[int, int], units: set[torch.dtype], as_the_machine_is: pytest.MonkeyPatch
) -> None:
    as_the_machine_is.setattr(torch.cuda, "is_initialized", lambda: True)
    as_the_machine_is.setattr(torch.cuda, "device_count", lambda: 1)
    as_the_machine_is.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {dtype for dtype in (torch.float16, torch.bfloat16) if has_units(dtype, "cuda")} == units
    assert autoamp.init(device_type="cuda").is_active() == bool(units)


def test_init_does_not_start_cuda_to_ask_it(as_the_machine_is: pytest.MonkeyPatch) -> None:
    def asked() -> tuple[int, int]:
        raise AssertionError("CUDA was asked")

    as_the_machine_is.setattr(torch.cuda, "is_initialized", lambda: False)
    as_the_machine_is.setattr(torch.cuda, "device_count", lambda: 1)
    as_the_machine_is.setattr(torch.cuda, "get_device_capability", asked)
    assert autoamp.init(device_type="cuda").is_active()


def test_apples_gpus_have_units_for_fp16(as_the_machine_is: pytest.MonkeyPatch) -> None:
    assert has_units(torch.float16, "mps")
    assert not has_units(torch.bfloat16, "mps")
