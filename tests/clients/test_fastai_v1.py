"""fastai v1 trains in mixed precision as it is, and on today's torch and pandas."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launches import ROOT, Ended, forks, launched

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.client("fastai", "pandas", "matplotlib", "fastprogress", "bs4"), forks]


@functools.cache
def ran(*argv: str) -> Ended:
    """Run a program or a command line of autoamp as a process of its own, since fastai cannot be imported anew."""
    done = launched(ROOT, {"program": ["MPLBACKEND=Agg", *argv]})["program"]
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    return done


def results_of(program: str, *arguments: str) -> dict[str, Any]:
    """Return what a program says in its last line."""
    found: dict[str, Any] = json.loads(ran("python", str(PROGRAMS / program), *arguments).out.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("order", "way"),
    [("first", way) for way in ("mixed", "by_hand", "to_fp16", "static")] + [("late", "mixed")],
)
def test_a_learner_trains_in_mixed_precision(order: str, way: str) -> None:
    found = results_of("fastai_training.py", order)
    mixed, exact = found[way], found["fp32"]
    assert mixed["dtypes"] == ["torch.float16"]
    assert exact["dtypes"] == ["torch.float32"]
    assert mixed["accuracy"] > 0.9
    # Scaled once by 2**16 or 2**15: the gradient of a mean over 64 samples is 1/64 at most.
    assert 2**5 < mixed["largest_gradient"] <= 2**16 / 64
    assert way != "static" or mixed["loss_scale"] == 2**14
    assert exact["largest_gradient"] <= 1 / 64
    # Callbacks see the true loss and clipped gradients.
    assert mixed["largest_loss"] == pytest.approx(exact["largest_loss"], rel=0.2)
    assert mixed["largest_norm"] <= 1.0
    assert mixed["recorded"] == pytest.approx(exact["recorded"], rel=0.01)


@pytest.mark.parametrize("way", ["mixed", "by_hand", "to_fp16"])
def test_a_skipped_step_leaves_the_weights_and_their_decay(way: str) -> None:
    mixed = results_of("fastai_training.py", "first")[way]
    assert mixed["not_moved"] == [5]
    assert mixed["skipped"] == 1
    assert mixed["loss_scale"] == 2**15


@pytest.mark.parametrize("order", ["first", "late"])
def test_fastai_is_restored(order: str) -> None:
    found = results_of("fastai_training.py", order)
    # The shim stays until disable().
    assert sorted(found["mixed"]["patched"]) == ["fit", "step", "zero_grad"]
    assert found["mixed"]["left"] == ["zero_grad"]
    assert found["left"] == []


def test_gradients_are_accumulated_and_fastais_own_mixed_precision_is_refused() -> None:
    found = results_of("fastai_training.py", "first")
    assert found["accumulated"] > 0.8
    assert "to_fp16" in found["own_callback"]


@pytest.mark.client("fastai", "pandas", "matplotlib", "fastprogress", "bs4", "torchvision")
def test_tables_ratings_and_images() -> None:
    found = results_of("fastai_data.py")
    assert found["dates"] == [[1, 1577664000], [6, 1580688000]]
    assert found["table"]["accuracy"] > 0.9
    assert found["table"]["exported"] > 0.9
    assert found["ratings"] < 0.25
    assert found["images"] > 0.9
    assert found["steps"] > 200
    assert found["loss_scale"] >= 1.0


# fp16 is slow where a CPU has no units for it: its classifier sees too few texts to be judged.
TEXTS = {"fp16": ("--texts", "240", "--epochs", "2"), "bf16": ("--texts", "600", "--epochs", "3")}


@pytest.mark.client("fastai", "pandas", "matplotlib", "fastprogress", "bs4", "sklearn")
@pytest.mark.parametrize("dtype", [pytest.param("fp16", marks=pytest.mark.variants), "bf16"])
def test_texts_under_the_command(dtype: str) -> None:
    command = ("run", "--fastai1", "--device-type", "cpu", "--dtype", dtype)
    done = ran(*command, str(ROOT / "examples" / "fastai_v1_text.py"), *TEXTS[dtype])
    ((before, after),) = re.findall(r"loss ([\d.]+) before, ([\d.]+) after", done.out)
    assert float(after) < float(before) - 1.0
    (accuracy,) = re.findall(r"classifier: accuracy ([\d.]+) %", done.out)
    assert float(accuracy) > 80 or dtype == "fp16"
    summary = re.search(r"autoamp: (\w+) on cpu", done.err)
    assert summary is not None
    assert summary[1] == {"fp16": "float16", "bf16": "bfloat16"}[dtype]


@pytest.mark.client("fastai", "pandas", "matplotlib", "fastprogress", "bs4", "sklearn")
def test_the_example_is_as_accurate_in_mixed_precision() -> None:
    output = ran("python", str(ROOT / "examples" / "fastai_v1.py")).out
    exact, mixed = (float(value) for value in re.findall(r"accuracy ([\d.]+) %", output))
    assert exact > 93
    assert mixed == pytest.approx(exact, abs=2.0)
