"""Walks through the code, as the interpreter lists them: which files and functions run, in the order of the first call.

``python -m tests.docs.walks`` writes the lists into CONTRIBUTING.md, between two marks.
"""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoamp
from tests.docs.pages import ROOT, text_of
from tests.launches import environment

PAGE = "CONTRIBUTING.md"
BEGIN, END = "<!-- walks: begin -->\n", "<!-- walks: end -->\n"

_PACKAGE = Path(autoamp.__file__).parent
_WIDTH, _COLUMN = 120, 29


class Walk:
    """The functions of autoamp that are called inside a ``with`` statement, nested ones under the name of the outer."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}

    def __enter__(self) -> Walk:
        # A finalizer that runs now or later is no part of the walk.
        gc.collect()
        gc.disable()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _called(self, frame: types.FrameType, event: str, _: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and not frame.f_code.co_name.startswith("<") and path.is_relative_to(_PACKAGE):
            self.functions.setdefault((path.relative_to(_PACKAGE).as_posix(), name))


def _skipped_step() -> Walk:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    model, x = nn.Linear(4, 1), torch.ones(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(4):
        step(model(x).float().mean())
    loss = model(x).float().mean() * 1e36
    with Walk() as walk:
        step(loss)
    assert handle.last_step_skipped
    handle.deactivate()
    return walk


def _linear() -> Walk:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    model, x = nn.Linear(4, 1), torch.ones(8, 4)
    for _ in range(3):
        model(x)
    with Walk() as walk:
        nn.functional.linear(x, model.weight, model.bias)
    handle.deactivate()
    return walk


def _handle() -> Walk:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16).deactivate()
    with Walk() as walk:
        autoamp.init(device_type="cpu", dtype=torch.bfloat16).deactivate()
    return walk


def _checkpoint() -> Walk:
    def train() -> None:
        model: Any = nn.Linear(4, 1)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, verbosity=0)
        loss = model(torch.ones(8, 4)).float().mean()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        states = model.state_dict(), optimizer.state_dict(), autoamp.state_dict()
        for one, state in zip((model, optimizer, autoamp), states, strict=True):
            one.load_state_dict(state)

    def deactivate() -> None:
        handle = autoamp.current_handle()
        assert handle is not None
        handle.deactivate()

    train()
    deactivate()
    with Walk() as walk:
        train()
    deactivate()
    return walk


# By title: the program, and the walks whose functions are not listed again.
WALKS: dict[str, tuple[Callable[[], Walk], tuple[str, ...]]] = {
    "A loss to a skipped step": (_skipped_step, ()),
    "A tensor through `F.linear`": (_linear, ()),
    "`init` to `deactivate`": (_handle, ()),
    # `initialize`, a step, and the three state dicts out and in.
    "An O2 parameter to its checkpoint and back": (
        _checkpoint,
        ("A loss to a skipped step", "`init` to `deactivate`"),
    ),
}


def shown(functions: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each file, longer ones wrapped: what others call of it, or what it calls itself if that is all.

    Files and functions are in the order of their first call. ``.step`` is a method of the class before it.
    """
    files: dict[str, dict[str, None]] = {}
    for path, name in functions:
        outer, _, method = name.partition(".<locals>")[0].partition(".")
        files.setdefault(path, {}).setdefault(outer if not method or method.startswith("__") else f"{outer}.{method}")
    for path, names in files.items():
        public = [name for name in names if not re.search(r"(^|\.)_", name)] or names
        classes = {name.partition(".")[0] for name in public if "." in name}
        kept, last = [], None
        for name in public:
            outer, _, method = name.partition(".")
            if name not in classes:
                kept.append(f".{method}" if method and outer == last else name)
                last = outer
        text = f"{path:<{_COLUMN}}{', '.join(kept)}"
        yield from textwrap.wrap(text, _WIDTH, subsequent_indent=" " * _COLUMN, break_on_hyphens=False)


def lists() -> str:
    """Return the walks as Markdown."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    walks = {title: walk().functions for title, (walk, _) in WALKS.items()}
    parts = []
    for title, functions in walks.items():
        known = {one for earlier in WALKS[title][1] for one in walks[earlier]}
        files = len({path for path, _ in functions})
        rest = "; those of the walks above are left out" if known else ""
        parts.append(f"**{title}**: {files} files, {len(functions)} functions{rest}.")
        lines = "\n".join(shown([one for one in functions if one not in known]))
        parts.append(f"```text\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def renewed() -> str:
    """Return the page with the lists as they are now, made in a process of its own and in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from tests.docs import walks; print(walks.lists(), end='')"]
        made = subprocess.run(command, cwd=folder, env=environment(), text=True, check=True, stdout=subprocess.PIPE)
    head, _, rest = text_of(PAGE).partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()}; put the lists between them")
    return f"{head}{BEGIN}\n{made.stdout}\n{END}{tail}"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(renewed(), encoding="utf-8")
