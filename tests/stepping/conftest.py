"""What tests of steps count, passes over gradients and reads that wait for a device; and a process group of one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autoamp.scaling import verdict
from autoamp.stepping.guard import StepGuard


@pytest.fixture
def one_process(tmp_path: Path, collected: Any) -> Iterator[None]:
    """A group of this process alone, in which nobody has a DistributedDataParallel yet."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    # Wrappers lie in cycles.
    collected()
    yield
    dist.destroy_process_group()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many found_inf tensors each reading took. A reading is one synchronisation on a device."""
    calls: list[int] = []
    read = verdict.found_any
    monkeypatch.setattr(verdict, "found_any", lambda found: calls.append(len(found)) or read(found))
    return calls


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The function of every pass over gradients."""
    calls: list[str] = []
    for file, name in (("guard", "unscale_"), ("block", "unscale_"), ("block", "scale_")):
        module = importlib.import_module(f"autoamp.stepping.{file}")
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))
    plainly = StepGuard.leave_plain_block

    def leave_plain_block(guard: StepGuard, *args: Any) -> bool:
        done = plainly(guard, *args)
        # Where it does nothing one of the functions above does.
        calls.extend(["unscale_"] * done)
        return done

    monkeypatch.setattr(StepGuard, "leave_plain_block", leave_plain_block)
    return calls
