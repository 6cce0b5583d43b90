"""The benchmark runs, and what it says on paper is right."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels import bench_cuda as paper
from tests.kernels.conftest import EmulatedCuda

ROOT = Path(__file__).resolve().parents[2]


def test_the_parameters_are_those_of_bert_large() -> None:
    sizes = paper.bert_large()
    assert len(sizes) == 398
    assert sum(sizes) == 336_226_108


@pytest.mark.parametrize(("sizes", "lists", "launches"), [
    ([], 2, 0),
    ([5], 2, 1),
    ([1] * 64, 2, 1),
    ([1] * 65, 2, 2),
    ([65536 * 320], 2, 1),
    ([65536 * 320 + 1], 2, 2),
    ([65536 * 319, 65536 * 2], 1, 2),
    ([1] * 110 + [65536], 1, 2),
])  # fmt: skip
def test_torchs_launches(sizes: list[int], lists: int, launches: int) -> None:
    assert paper.launches_of_torch(sizes, lists) == launches


def test_launches_are_those_of_the_launcher(emulated: EmulatedCuda) -> None:
    for tensors in (400, 2000):
        model = paper.Model([1] * tensors, device="cpu")
        model.kernel()
        assert len(emulated.launches()) == paper.launches_of_kernel(tensors, "adam_")
        model.checked()
        expected = paper.launches_of_kernel(tensors, "adam_") + paper.launches_of_kernel(tensors, "scale_, check")
        assert len(emulated.launches()) == expected


def test_both_paths_take_the_same_step() -> None:
    ours, torchs = paper.Model([5, 33], device="cpu"), paper.Model([5, 33], device="cpu")
    ours.checked()
    torchs.torchs(check=True)
    torch.testing.assert_close(ours.masters, torchs.masters)
    assert all(map(torch.equal, ours.halves, torchs.halves))
    assert not torch.equal(ours.masters[0], torch.full((5,), 0.5))


class Event:
    """Stands for CUDA's, without a GPU."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_the_table_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    paper.on_gpu(3, [5, 3000], device="cpu")
    said = capsys.readouterr().out
    assert "a card, 2 parameters of 3,005 elements, 3 rounds" in said
    assert said.count("of copy bandwidth") == len(paper.PATHS)


def test_bytes_are_those_of_the_issue() -> None:
    assert list(paper.BYTES.values()) == [28, 40, 30, 48]


# Not by default: seconds of a core.
@pytest.mark.emulated
@pytest.mark.parametrize(("options", "said"), [
    (["--million", "0.01"], ["share of that", "torch.amp's whole step", "novograd_", "On paper", "336,226,108"]),
    (["--norms"], ["FusedRMSNorm, 4096 x 1024, bfloat16", "(64, 512, 7, 7), torch.float32"]),
])  # fmt: skip
def test_the_tables_are_printed(options: list[str], said: list[str]) -> None:
    command = [sys.executable, "-m", "kernels.bench", "--rounds", "2", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(one in done.stdout for one in said), done.stdout
