"""The examples run, print what they should, and refuse what they must."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integration.spawned import torchrun
from tests.launches import ROOT, Ended, launched
from tests.states import differences

EXAMPLES = ROOT / "examples"
TINY_IMAGENET = ("--images", "40", "--batch-size", "10", "--device", "cpu", "--seed", "3")
RESUMED = (*TINY_IMAGENET, "--opt-level", "O2", "--loss-scale", "dynamic", "--dtype", "bf16")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "rich")),
    reason="the extra 'examples' is not installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples write."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """What became of each example."""
    cpu = ("--device", "cpu")
    saved = {name: ("--save", str(folder / f"{name}.pt")) for name in ("whole", "half", "resumed")}
    run = ("run", "--device-type", "cpu", "--dtype")
    runs: dict[str, Sequence[str]] = {
        "whole": ("python", "imagenet.py", *RESUMED, "--epochs", "2", *saved["whole"]),
        "half": ("python", "imagenet.py", *RESUMED, "--epochs", "1", *saved["half"]),
        "resumed": (
            "python", "imagenet.py", *RESUMED, "--epochs", "2", "--resume", str(folder / "half.pt"), *saved["resumed"]
        ),
        "dcgan": ("python", "dcgan.py", "--synthetic", "--opt-level", "O2", "--epochs", "1", "--batch-size", "256",
                  "--out", str(folder / "grid.png"), *cpu),
        "checkpoint": ("python", "checkpoint.py", "--steps", "20", "--stop", "9", "--optimizer", "SGD", "Adam", *cpu),
        "fp16_optimizer": ("python", "fp16_optimizer.py", "--epochs", "3", *cpu),
        "levels": ("python", "digits.py", "--all-levels", "--seeds", "1", "--epochs", "6", "--dtype", "bf16", "--json",
                   *cpu),
        "plain": ("python", "plain_digits.py"),
        "mixed": (*run, "bf16", "plain_digits.py"),
        "overflow": (*run, "fp16", "--report", str(folder / "one.json"), "overflow.py", "--steps", "40"),
    }  # fmt: skip
    wide = {name: ("COLUMNS=120", *argv) for name, argv in runs.items()}
    return launched(EXAMPLES, wide, ["sklearn.datasets"])


def printed(ended: Ended) -> str:
    """Return what an example printed, which ended well."""
    assert ended.code == 0, ended.out + ended.err
    return ended.out


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a printed table, but for its head."""
    lines = [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in cells] for cells in lines]


Loader = Callable[[str], ModuleType]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """Return a function that loads an example as a module."""
    # As for a script, where what examples share is found.
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name: str) -> ModuleType:
        spec: Any = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


# -- imagenet --


def epochs_of(output: str) -> list[tuple[float, float, float]]:
    """Return training loss, validation loss and top-1 accuracy of each epoch that was printed."""
    found = re.findall(r"epoch \d+/\d+: train loss ([\d.]+), val loss ([\d.]+), top-1 ([\d.]+) %", output)
    return [(float(train), float(val), float(top1)) for train, val, top1 in found]


def test_imagenet_resumes_bitwise(folder: Path, ended: dict[str, Ended]) -> None:
    epochs = epochs_of(printed(ended["whole"]))
    assert epochs_of(printed(ended["half"])) == epochs[:1]
    out = printed(ended["resumed"])
    assert out.startswith("resnet18 at O2 on 1 x cpu: 40 training and 10 validation images")
    assert "loss scale 65536, skipped 0" in out
    assert re.search(r"^best top-1: [\d.]+ %$", out, re.MULTILINE)
    assert epochs_of(out) == epochs[1:]
    whole, half, resumed = (torch.load(folder / f"{name}.pt") for name in ("whole", "half", "resumed"))
    assert set(whole) == {"epoch", "best", "model", "optimizer", "amp"}
    assert whole["epoch"] == 2
    assert whole["amp"]["loss_scaler0"]["unskipped"] == 8
    assert {value.dtype for value in whole["model"].values()} == {torch.float32, torch.int64}
    assert differences(whole, resumed) == []
    assert differences(whole, half) != []


@pytest.mark.processes
def test_imagenet_trains_on_two_processes() -> None:
    options = ("--epochs", "1", "--opt-level", "O2", "--dtype", "bf16")
    printed = torchrun(2, "imagenet.py", *TINY_IMAGENET, *options)
    assert printed.count("resnet18 at O2 on 2 x cpu: 40 training") == 1
    ((train_loss, _, top1),) = epochs_of(printed)
    assert 0 < train_loss < 10
    # All ten validation images are counted, five by each process.
    assert top1 % 10 == 0


# -- dcgan, checkpoint, fp16_optimizer --


def test_dcgan_prints_losses_scales_and_skips(folder: Path, ended: dict[str, Ended]) -> None:
    (first,) = rows_of(printed(ended["dcgan"]))
    assert first[0] == "1"
    assert all(0 < float(loss) < 20 for loss in first[1:4])
    assert all(0 < float(probability) < 1 for probability in first[4:6])
    scales = [float(scale) for scale in first[6].split()]
    assert len(scales) == 3
    assert all(scale in {2.0**power for power in range(8, 17)} for scale in scales)
    assert re.fullmatch(r"\d+, \d+", first[7])
    assert f"wrote 64 generated images to {folder / 'grid.png'}" in " ".join(ended["dcgan"].out.split())
    assert (folder / "grid.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_checkpoint_agrees_bitwise(ended: dict[str, Ended]) -> None:
    rows = rows_of(printed(ended["checkpoint"]))
    assert [row[:2] for row in rows] == [[f"O{level}", name] for level in range(4) for name in ("SGD", "Adam")]
    for level, _, skipped, scale, loss, resumed, bits in rows:
        assert loss == resumed
        assert bits == "equal"
        before, after = map(int, skipped.split(" + "))
        # fp32 does not overflow; in fp16 there are skips on both sides of the stop.
        assert (level == "O0") == (before == after == 0) == (scale == "16777216")
    assert "every resumed run agrees bitwise with the one without a stop" in ended["checkpoint"].out


def test_fp16_optimizer_prints_a_table(ended: dict[str, Ended]) -> None:
    rows = rows_of(printed(ended["fp16_optimizer"]))
    assert [row[0] for row in rows] == ["1", "2", "3"]
    accuracies, rates, scales, norms, skips = ([float(row[i]) for row in rows] for i in range(2, 7))
    assert accuracies[-1] > 90
    assert rates == pytest.approx([0.2, 0.15, 0.05])
    assert all(norm > 0 for norm in norms)
    # The scale begins at 2**20, and is halved by each skip.
    assert skips[0] > 0
    assert [scale * 2**skip for scale, skip in zip(scales, skips, strict=True)] == [2.0**20] * 3


# -- digits --


@pytest.mark.parametrize("rich", [True, False])
def test_digits_prints_a_table_with_and_without_rich(
    example: Loader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    digits = example("digits")
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "rich", None)
    # Of the accuracy of one epoch nothing is asked.
    monkeypatch.setattr(digits, "TOLERANCE", 100.0)
    assert digits.main(["--seeds", "2", "--epochs", "1", "--width", "16", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    table = {line.split()[0]: line for line in captured.out.splitlines() if line}
    assert re.match(r"\W*mode +accuracy % +kept +epoch +speed +skipped", table["mode"])
    # The one that init() takes on a CPU.
    assert "fp16" not in table
    row = r"\W*bf16 +[\d.]+ ± [\d.]+ +[\d,]+ KiB +\d+ ms +[\d.]+ \([\d.]+-[\d.]+\) +0 *$"
    lines = [line for line in captured.out.splitlines() if "bf16" in line]
    assert re.match(row, lines[0])
    assert re.match("bf16.*(pays here|does not pay here|takes about the time|too noisy)", lines[1])
    assert ("run 4 of 4: bf16, seed 1" in captured.err) is not rich


@pytest.mark.parametrize(
    ("times", "said", "pays"),
    [
        ((2.0, 1.8, 2.2), "bf16 pays here: 2.00 (1.80-2.20) times the speed of fp32, keeps 40% less", True),
        ((0.5, 0.4, 0.6), "bf16 does not pay here: 0.50 (0.40-0.60) times the speed of fp32; it keeps 40% less", False),
        ((1.0, 0.98, 1.02), "bf16 takes about the time of fp32 here", False),
        ((1.3, 0.6, 1.9), "bf16: too noisy to tell whether it is faster: speed 1.30 (0.60-1.90)", True),
        ((2.0,), "bf16: one seed cannot tell whether it is faster", True),
    ],
)
def test_digits_says_whether_it_pays(example: Loader, times: tuple[float, ...], said: str, pays: bool) -> None:
    digits = example("digits")
    exact = [digits.Run(98.0, 1000, 0, 1.0, seconds) for seconds in times]
    mixed = [digits.Run(98.5, 600, 0, 1.0, 1.0) for _ in times]
    one = digits.Compared.of("bf16", mixed, exact)
    assert one.verdict.startswith(said)
    assert one.verdict.endswith("accuracy +0.50 points.")
    assert one.pays is pays


def test_digits_trains_at_all_levels(ended: dict[str, Ended]) -> None:
    modes = json.loads(printed(ended["levels"]))["modes"]
    runs = {name: mode["runs"][0] for name, mode in modes.items()}
    assert list(runs) == ["fp32", "bf16", "O1 bf16", "O2 bf16", "FP16_Optimizer"]
    assert all(one["accuracy"] > 90 for one in runs.values())
    # O1 is what init() does. At O2 and by hand no copies of the weights are saved.
    told = ("accuracy", "saved_bytes", "skipped_steps", "loss_scale")
    assert [runs["O1 bf16"][name] for name in told] == [runs["bf16"][name] for name in told]
    saved = {name: one["saved_bytes"] for name, one in runs.items()}
    assert saved["O2 bf16"] == saved["FP16_Optimizer"] < saved["O1 bf16"] < saved["fp32"]
    assert [one["loss_scale"] for one in runs.values()] == [1, 1, 1, 1, 65536]
    assert modes["bf16"]["memory"] == saved["bf16"] / saved["fp32"]
    assert modes["bf16"]["speed"] == [runs["fp32"]["epoch_seconds"] / runs["bf16"]["epoch_seconds"]]
    assert modes["bf16"]["verdict"].startswith("bf16: one seed cannot tell")


@pytest.mark.parametrize(("name", "said"), [("plain", ""), ("mixed", "autoamp: bfloat16 on cpu (O1); ")])
def test_plain_digits_is_as_accurate_in_mixed_precision(name: str, said: str, ended: dict[str, Ended]) -> None:
    accuracy = re.fullmatch(r"accuracy on 400 held-out images: ([0-9.]+) %", printed(ended[name]).splitlines()[-1])
    assert accuracy is not None
    assert float(accuracy[1]) > 97
    assert ended[name].err.startswith(said)
    # The summary of a run is one line in a pipe.
    assert ended[name].err.count("\n") == len(said[:1])


# -- overflow --


def test_the_planted_fault_is_found_with_an_entry(folder: Path, ended: dict[str, Ended]) -> None:
    printed(ended["overflow"])
    found = json.loads((folder / "one.json").read_text(encoding="utf-8"))
    lines = (EXAMPLES / "overflow.py").read_text(encoding="utf-8").splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "square = " in text)
    assert found["verdict"]["sentence"].startswith(
        "2 of 40 steps skipped, all by an op in half precision; forward overflow in mul"
    )
    assert found["skips"]["groups"][0]["overflow"]["location"].endswith(f"overflow.py:{line}")
    # With its entry such a program has no overflow: test_overflows_by_hand.
    assert [one["op"] for one in found["remedies"] if one["policy"] == "fp32"] == ["__mul__", "__rmul__"]
