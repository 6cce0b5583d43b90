"""A program that writes to anything trains bit for bit the same while steps are looked at, and its code runs once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.tools.step_recorder import StepRecorder

CALLS: list[int] = []


class Writer(nn.Module):
    """The base of models that write somewhere in ``forward``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.big = 1.0
        self.file = folder / "written"
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.write(self.first(x))
        out: Tensor = self.last(hidden * self.big * self.big)
        return out

    def write(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Momentum(Writer):
    """As MoCo and BYOL: a second encoder that follows, written in place."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.follower = nn.Linear(8, 8)
        self.follower.requires_grad_(False)

    def write(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            for param in self.follower.parameters():
                param.mul_(0.9).add_(0.1 * float(self.first.weight.mean()))
        return hidden + self.follower(hidden)


class Data(Momentum):
    """The same by ``.data``."""

    def write(self, hidden: Tensor) -> Tensor:
        for param in self.follower.parameters():
            param.data.mul_(0.9)
            param.data += 0.01
        return hidden + self.follower(hidden)


class Swapped(Momentum):
    """The same by another ``.data``."""

    def write(self, hidden: Tensor) -> Tensor:
        for param in self.follower.parameters():
            param.data = param.data * 0.9 + 0.01
        return hidden + self.follower(hidden)


class Codebook(Writer):
    """As a VQ-VAE: a plain tensor of the module."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.codes = torch.linspace(-1.0, 1.0, 8)

    def write(self, hidden: Tensor) -> Tensor:
        self.codes.mul_(0.9).add_(0.1 * hidden.detach().float().mean(0))
        return hidden + self.codes


class Queue(Writer):
    """A queue of tensors, and its place in a buffer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.queue: list[Tensor] = []
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def write(self, hidden: Tensor) -> Tensor:
        self.queue.append(hidden.detach().float().mean(0))
        self.place += 1
        return hidden + self.queue[int(self.place) // 2]


class Array(Writer):
    """An array of numpy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.array = numpy.zeros(8, dtype=numpy.float32)

    def write(self, hidden: Tensor) -> Tensor:
        self.array += hidden.detach().float().mean(0).numpy()
        self.array *= 0.9
        return hidden + torch.from_numpy(self.array.copy())


class Global(Writer):
    """A list of the program."""

    def write(self, hidden: Tensor) -> Tensor:
        CALLS.append(len(CALLS))
        return hidden + 0.01 * sum(CALLS)


class File(Writer):
    """A file."""

    def write(self, hidden: Tensor) -> Tensor:
        count = self.file.stat().st_size if self.file.exists() else 0
        with self.file.open("a") as file:
            file.write("x")
        return hidden + 0.01 * count


class Spectral(Writer):
    """Spectral normalization by hand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.u = torch.ones(8) / 8**0.5

    def write(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.first.weight.float()
            v = F.normalize(weight.T @ self.u, dim=0)
            self.u.copy_(F.normalize(weight @ v, dim=0))
        return hidden / (self.u @ self.first.weight @ v)


class Outside(Writer):
    """A teacher that is no part of the model."""

    teachers: list[nn.Linear]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.teachers = [nn.Linear(8, 8)]

    def write(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.teachers[0].parameters():
                weight.lerp_(torch.full_like(weight, float(hidden.mean())), 0.1)
        return hidden + self.teachers[0](hidden)


MODELS = [Momentum, Data, Swapped, Codebook, Queue, Array, Global, File, Spectral, Outside]


@pytest.fixture
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Returns what lets steps be recorded, or not."""
    call_begun = StepRecorder.call_begun

    def keep(keeps: bool) -> None:
        monkeypatch.setattr(StepRecorder, "call_begun", call_begun if keeps else lambda *given: None)

    return keep


LOOKS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "nothing": ({}, lambda handle: contextlib.nullcontext()),
    "trace_overflow": ({"trace_overflow": True}, lambda handle: contextlib.nullcontext()),
    "capsule": ({}, lambda handle: contextlib.nullcontext()),
    "record": ({"trace_overflow": True}, lambda handle: handle.record()),
}


def trained(
    kind: type[Writer], dtype: torch.dtype, folder: Path, settings: dict[str, Any], look: Callable[[Any], Any]
) -> tuple[list[Tensor], int]:
    """Return all values after some steps, of which some overflow, and how often ``forward`` was called."""
    folder.mkdir()
    torch.manual_seed(0)
    CALLS.clear()
    handle: Any = autoamp.init(device_type="cpu", dtype=dtype, on_nonfinite="skip", **settings)
    model = kind(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with look(handle):
        for step in range(8):
            model.big = 1e30 if step in (1, 5) else 1.0
            loss = model(torch.randn(5, 4)).float().square().mean()
            optimizer.zero_grad()
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert handle.skipped_steps >= 2 or dtype is torch.bfloat16
    handle.deactivate()
    return [*model.state_dict().values(), torch.get_rng_state()], model.calls


@pytest.mark.filterwarnings("ignore:step . of Adam has inf or nan")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_looking_on_changes_nothing(
    kind: type[Writer], dtype: torch.dtype, tmp_path: Path, nothing_recorded: Callable[[bool], None]
) -> None:
    nothing_recorded(False)
    expected, calls = trained(kind, dtype, tmp_path / "plain", {}, lambda handle: contextlib.nullcontext())
    assert calls == 8
    nothing_recorded(True)
    for name, (settings, look) in LOOKS.items():
        given = {"capsule": tmp_path / "capsules"} if name == "capsule" else settings
        found, calls = trained(kind, dtype, tmp_path / name, given, look)
        assert calls == 8, name
        assert all(map(torch.equal, found, expected)), name
