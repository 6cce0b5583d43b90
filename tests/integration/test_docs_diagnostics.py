"""The code in docs/diagnostics.md runs, block after block in one program."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "diagnostics.md"


def test_the_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names = {"__name__": "page"}
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
