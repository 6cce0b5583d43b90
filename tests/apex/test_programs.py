"""Programs that import `apex` and know nothing of autoamp, in the style of 2018 to 2022, run as they are."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autoamp.apex import install_as_apex

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
# These check fp16 itself, or a loss scale that changes, which bf16 does not need.
FP16_ONLY = {"bert_flat_allreduce", "early_checkpoint", "fp16_optimizer_by_hand"}
CASES = [
    pytest.param(program, dtype, id=f"{program.stem}-{dtype}")
    for dtype in (torch.float16, torch.bfloat16)
    for program in PROGRAMS
    if dtype is torch.float16 or program.stem not in FP16_ONLY
]


@pytest.mark.usefixtures("apex")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "dtype"), CASES)
def test_program_runs_unmodified(
    program: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "autoamp" not in program.read_text(encoding="utf-8")
    install_as_apex(dtype=dtype, device_type="cpu")
    monkeypatch.setattr(sys, "argv", [str(program)])
    try:
        # Programs of several processes write their rank to the environment.
        with mock.patch.dict(os.environ):
            runpy.run_path(str(program), run_name="__main__")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert "->" in capsys.readouterr().out, "the program did not print its losses"
