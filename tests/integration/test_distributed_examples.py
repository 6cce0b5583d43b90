"""The examples of several processes train, are killed in mid-step and resume, bit for bit."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.spawned import torchrun
from tests.states import differences, flat

FAULTY = Path(__file__).with_name("faulty.py")
TINY = ("--steps", "8", "--every", "3", "--batch-size", "4", "--length", "16", "--width", "16", "--depth", "2")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="the extra 'examples' is not installed"),
]


def bits_of(checkpoint: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    return flat(torch.load(whole, weights_only=False))


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("ddp", ("--opt-level", "O1", "--dtype", "fp16")),
        ("fsdp2", ("--opt-level", "O2", "--dtype", "fp16")),
    ],
)
def test_a_rank_that_is_killed_in_mid_step(example: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Torchrun starts all ranks anew, they go on from the last checkpoint, and nothing tells the run from another."""
    torchrun(2, f"{example}.py", *TINY, *options, "--checkpoints", str(tmp_path / "whole"))
    killed = tmp_path / "killed"
    printed = torchrun(2, str(FAULTY), example, "1", "5", *TINY, *options, "--checkpoints", str(killed), restarts=1)
    assert "Signal 9 (SIGKILL)" in printed or "exitcode: -9" in printed
    assert "goes on after step 3" in printed
    whole = bits_of(tmp_path / "whole" / "step-000008")
    assert differences(bits_of(killed / "step-000008"), whole) == []
    assert whole[".training.amp.loss_scaler0.unskipped"] == 8
    assert whole[".training.optimizer.state.head.weight.exp_avg"].dtype is torch.float32
    # On another number of ranks it goes on too, to sums in another order, and so it does in the other wrapper.
    printed = torchrun(1, "ddp.py", *TINY, *options, "--steps", "9", "--checkpoints", str(killed))
    assert "goes on after step 8" in printed
    resumed = bits_of(killed / "step-000009")
    assert resumed.keys() == whole.keys()
    assert resumed[".training.amp.loss_scaler0.unskipped"] == 9


@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_the_examples_learn(example: str) -> None:
    printed = torchrun(2, f"{example}.py", "--steps", "30", "--batch-size", "8", "--length", "64", "--width", "64")
    (loss,) = re.findall(r"on 2 x \w+: loss ([\d.]+) after step 30, loss scale 1, skipped 0", printed)
    # Of 256 bytes that are equally likely it is 5.5.
    assert float(loss) < 3.6
    assert "30/30 steps" in printed
