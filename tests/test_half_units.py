"""No half precision without units: on this CPU in processes of their own, on other devices as torch tells of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.half_units import default_half_dtype, has_units
from autoamp.tensors import HALF_DTYPES
from tests.launches import Ended, launched, written

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


def run_as(folder: Path, runs: dict[str, list[str]], isa: str | None = None) -> dict[str, Ended]:
    """Run programs as a user does, on the units that the machine has, up to those of an instruction set."""
    texts = {"script.py": SCRIPT, "own.py": INIT.format(dtype=None), "named.py": INIT.format(dtype="torch.bfloat16")}
    runs = {name: ["run", "--quiet", *argv] if argv[0] == "script.py" else argv for name, argv in runs.items()}
    return launched(written(folder, texts), runs, AUTOAMP_HALF_UNITS=None, ONEDNN_MAX_CPU_ISA=isa)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ONEDNN_MAX_CPU_ISA is tested on Linux")
@pytest.mark.skipif("x86" not in torch.cpu.get_capabilities()["architecture"], reason="AVX2 is of x86")
def test_without_units_a_program_runs_in_fp32_unless_it_names_a_dtype_and_is_told_so_once(tmp_path: Path) -> None:
    runs = {
        "default": ["script.py"], "own": ["python", "own.py"], "doctor": ["doctor", "--quick"],
        "named": ["run", "--quiet", "--dtype", "bf16", "script.py"], "own named": ["python", "named.py"],
    }  # fmt: skip
    ended = run_as(tmp_path, runs, "AVX2")
    assert ended["default"].out == "torch.float32\n"
    (line,) = ended["default"].err.splitlines()
    assert "no bf16 units (ONEDNN_MAX_CPU_ISA=AVX2)" in line
    assert "--dtype bf16" in line
    assert ended["own"].out.split() == ["torch.float32"] * 3
    assert "no bf16 units (ONEDNN_MAX_CPU_ISA=AVX2)" in ended["doctor"].out
    assert "float32; float32 for `autoamp run`" in ended["doctor"].out
    assert ended["named"].out == "torch.bfloat16\n"
    assert ended["own named"].out.split() == ["torch.bfloat16"] * 3
    for name in ("named", "own named"):
        assert ended[name].err.count("slower than in fp32") == 1
        assert "enabled=False" in ended[name].err
    # The command has no line that a reader could change.
    assert ended["named"].err.startswith("this CPU has no ")
    assert len(ended["named"].err.splitlines()) == 1
    assert "named.py:" in ended["own named"].err


@pytest.mark.skipif(not REAL_BF16, reason="this CPU has no bf16 units")
def test_with_units_the_default_is_bf16_and_nothing_is_told(tmp_path: Path) -> None:
    ended = run_as(tmp_path, {"default": ["script.py"]})["default"]
    assert (ended.out, ended.err) == ("torch.bfloat16\n", "")


@pytest.fixture
def as_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What torch tells of the machine decides."""
    monkeypatch.delenv("AUTOAMP_HALF_UNITS")
    return monkeypatch


def halves_of(device_type: str) -> set[torch.dtype]:
    return {dtype for dtype in HALF_DTYPES if has_units(dtype, device_type)}


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
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # oneDNN has no kernels for bf16 on the machine that runs this test.
        units = units - {torch.bfloat16}
    assert halves_of("cpu") == units
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
    assert halves_of("cuda") == units
    assert autoamp.init(device_type="cuda").is_active() == bool(units)


def test_init_does_not_start_cuda_to_ask_it(as_the_machine_is: pytest.MonkeyPatch) -> None:
    as_the_machine_is.setattr(torch.cuda, "is_initialized", lambda: False)
    as_the_machine_is.setattr(torch.cuda, "device_count", lambda: 1)
    # Whoever asks fails.
    as_the_machine_is.delattr(torch.cuda, "get_device_capability")
    assert autoamp.init(device_type="cuda").is_active()


def test_apples_gpus_have_units_for_fp16(as_the_machine_is: pytest.MonkeyPatch) -> None:
    assert halves_of("mps") == {torch.float16}


def test_default_half_dtype_is_torch_s_own() -> None:
    assert default_half_dtype("cpu") is torch.bfloat16
    assert default_half_dtype("cuda") is torch.float16
    assert set(HALF_DTYPES) == {torch.float16, torch.bfloat16}
