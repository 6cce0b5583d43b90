"""The examples of the opt levels run, print what they should, and refuse what they must."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TINY_IMAGENET = ("--images", "40", "--batch-size", "10", "--device", "cpu", "--seed", "3")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "rich")),
    reason="the extra 'examples' is not installed",
)


def run(*command: str) -> str:
    """Run a script with the tree on the path, expect the exit code 0, and return what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        cwd=EXAMPLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a printed table, but for its head."""
    lines = [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in cells] for cells in lines]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that loads an example as a module."""
    # As for a script, where what examples share is found.
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


Loader = Callable[[str], ModuleType]


@pytest.mark.parametrize("name", ["imagenet", "dcgan", "checkpoint", "fp16_optimizer", "digits"])
def test_help_gives_the_defaults(example: Loader, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example(name).parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage" in text
    if name != "digits":
        assert text.count("default: ") >= 5


# -- imagenet --


def epochs_of(output: str) -> list[tuple[float, float, float]]:
    """Return training loss, validation loss and top-1 accuracy of each epoch that was printed."""
    found = re.findall(r"epoch \d+/\d+: train loss ([\d.]+), val loss ([\d.]+), top-1 ([\d.]+) %", output)
    return [(float(train), float(val), float(top1)) for train, val, top1 in found]


def same(ours: Any, theirs: Any) -> bool:
    """Tell whether two nests of dicts, lists, tensors and plain values are the same, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and as_bytes(ours) == as_bytes(theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As `run` has it: on some CPUs the last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_imagenet_resumes_bitwise(example: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, half, resumed = (str(tmp_path / name) for name in ("whole.pt", "half.pt", "resumed.pt"))
    options = [*TINY_IMAGENET, "--opt-level", "O2", "--loss-scale", "dynamic", "--dtype", "bf16"]
    main = example("imagenet").main
    assert main([*options, "--epochs", "2", "--save", whole]) == 0
    expected_epochs = epochs_of(capsys.readouterr().out)
    assert main([*options, "--epochs", "1", "--save", half]) == 0
    assert epochs_of(capsys.readouterr().out) == expected_epochs[:1]
    printed = run("imagenet.py", *options, "--epochs", "2", "--resume", half, "--save", resumed)
    assert printed.startswith("resnet18 at O2 on 1 x cpu: 40 training and 10 validation images")
    assert "loss scale 65536, skipped 0" in printed
    assert re.search(r"^best top-1: [\d.]+ %$", printed, re.MULTILINE)
    assert epochs_of(printed) == expected_epochs[1:]
    expected, found = torch.load(whole), torch.load(resumed)
    assert set(expected) == {"epoch", "best", "model", "optimizer", "amp"}
    assert expected["epoch"] == 2
    assert expected["amp"]["loss_scaler0"]["unskipped"] == 8
    assert {value.dtype for value in expected["model"].values()} == {torch.float32, torch.int64}
    assert same(expected, found)
    assert not same(expected, torch.load(half))


@pytest.mark.processes
def test_imagenet_trains_on_two_processes() -> None:
    printed = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "imagenet.py",
        *TINY_IMAGENET, "--epochs", "1", "--opt-level", "O2", "--dtype", "bf16",
    )  # fmt: skip
    assert printed.count("resnet18 at O2 on 2 x cpu: 40 training") == 1
    ((train_loss, _, top1),) = epochs_of(printed)
    assert 0 < train_loss < 10
    # All ten validation images are counted, five by each process.
    assert top1 % 10 == 0


def test_imagenet_shuffles_by_epoch_and_shares_among_processes(
    example: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagenet = example("imagenet")
    options = imagenet.parse([*TINY_IMAGENET, "--opt-level", "O0"])
    orders: list[list[int]] = []

    def note(model: Any, optimizer: Any, batches: Any, place: Any) -> float:
        orders.append(torch.cat([labels for _, labels in batches]).tolist())
        return 0.0

    monkeypatch.setattr(imagenet, "train", note)
    training = imagenet.Training(options, imagenet.Place(torch.device("cpu"), 0, 1))
    for _ in range(2):
        training.run_epoch(imagenet.Progress(disable=True))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    monkeypatch.setattr(imagenet.Place, "wrap", lambda self, model: model)
    shares = [imagenet.Training(options, imagenet.Place(torch.device("cpu"), rank, 2)) for rank in range(2)]
    assert sorted(index for share in shares for index in share.sampler) == list(range(40))
    assert sorted(index for share in shares for index in share.val_loader.dataset.indices) == list(range(10))


def test_imagenet_reads_its_options(example: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    parse = example("imagenet").parse
    options = parse(["--loss-scale", "dynamic", "--keep-batchnorm-fp32", "True"])
    assert (options.loss_scale, options.keep_batchnorm_fp32, options.synthetic) == ("dynamic", True, True)
    assert (options.epochs, options.image_size, options.batch_size) == (3, 32, 32)
    options = parse(["data", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "False", "--epochs", "5"])
    assert (options.loss_scale, options.keep_batchnorm_fp32, options.synthetic) == (128.0, False, False)
    assert (options.epochs, options.image_size, options.batch_size) == (5, 224, 256)
    assert parse([]).loss_scale is parse([]).keep_batchnorm_fp32 is None
    for wrong in (
        ["--keep-batchnorm-fp32", "maybe"],
        ["--loss-scale", "big"],
        ["data", "--synthetic"],
        ["--image-size", "31"],
    ):
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)
        assert wrong[0] in capsys.readouterr().err


def test_imagenet_reads_a_directory(example: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("val", 2)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                suffix = "png" if number % 2 else "jpg"
                pillow.new("RGB", (30 + number, 40), colour).save(folder / f"{number}.{suffix}")
    imagenet = example("imagenet")
    images = imagenet.ImageFolder(tmp_path / "train", None, 16, augmented=True, seed=0)
    assert (len(images), images.classes) == (12, ["blue", "red"])
    image, label = images[11]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 1)
    assert image.flatten(1).float().mean(dim=1).tolist() == pytest.approx([255, 0, 0], abs=3)
    tiny = ["--image-size", "32", "--batch-size", "4", "--epochs", "1", "--device", "cpu", "--opt-level", "O0"]
    assert imagenet.main([str(tmp_path), *tiny]) == 0
    printed = capsys.readouterr().out
    assert "12 training and 4 validation images" in printed
    assert len(epochs_of(printed)) == 1


# -- dcgan --


def test_dcgan_prints_losses_scales_and_skips(tmp_path: Path) -> None:
    picture = tmp_path / "grid.png"
    tiny = ("--synthetic", "--epochs", "1", "--batch-size", "256", "--device", "cpu", "--out", str(picture))
    printed = run("dcgan.py", "--opt-level", "O2", *tiny)
    (first,) = rows_of(printed)
    assert first[0] == "1"
    assert all(0 < float(loss) < 20 for loss in first[1:4])
    assert all(0 < float(probability) < 1 for probability in first[4:6])
    scales = [float(scale) for scale in first[6].split()]
    assert len(scales) == 3
    assert all(scale in {2.0**power for power in range(8, 17)} for scale in scales)
    assert re.fullmatch(r"\d+, \d+", first[7])
    assert f"wrote 64 generated images to {picture}" in " ".join(printed.split())
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_dcgan_counts_skips_apart_and_writes_no_file(
    example: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dcgan = example("dcgan")

    def overflowing_generator() -> torch.nn.Module:
        net = dcgan.torch.nn.Sequential(make_generator(), torch.nn.Identity())
        # fp16 reaches to 65504 only.
        net[1].register_full_backward_hook(lambda module, inputs, outputs: (outputs[0] * 1e5,))
        return net

    make_generator = dcgan.make_generator
    monkeypatch.setattr(dcgan, "make_generator", overflowing_generator)
    arguments = ["--epochs", "1", "--batch-size", "600", "--device", "cpu", "--opt-level", "O2", "--dtype", "fp16"]
    assert dcgan.main(arguments) == 0
    (row,) = rows_of(capsys.readouterr().out)
    assert row[6].split() == ["65536", "65536", "8192"]
    assert row[7] == "0, 3"
    assert list(tmp_path.iterdir()) == []


# -- checkpoint --


def test_checkpoint_agrees_bitwise() -> None:
    printed = run("checkpoint.py", "--steps", "20", "--stop", "9", "--device", "cpu", "--optimizer", "SGD", "Adam")
    rows = rows_of(printed)
    assert [row[:2] for row in rows] == [[f"O{level}", name] for level in range(4) for name in ("SGD", "Adam")]
    for level, _, skipped, scale, loss, resumed, bits in rows:
        assert loss == resumed
        assert bits == "equal"
        before, after = map(int, skipped.split(" + "))
        # fp32 does not overflow; in fp16 there are skips on both sides of the stop.
        assert (level == "O0") == (before == after == 0) == (scale == "16777216")
    assert "every resumed run agrees bitwise with the one without a stop" in printed


@pytest.mark.parametrize(
    ("part", "key"), [("amp", "loss_scaler0"), ("optimizer", "state"), ("model", "0.weight"), ("random", None)]
)
def test_checkpoint_notices_what_is_not_restored(
    example: Loader, part: str, key: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = example("checkpoint")

    def resume_from_torn(command: Sequence[str], *, check: bool) -> None:
        path = Path(command[-1])
        state = torch.load(path)
        if key == "loss_scaler0":
            state[part][key]["loss_scale"] /= 2
        elif key == "state":
            state[part][key][0]["momentum_buffer"] += 1e-3
        elif key == "0.weight":
            state[part][key][0, 0] += 2e-3
        else:
            state[part] = [torch.Generator().manual_seed(9).get_state()]
        torch.save(state, path)
        checkpoint.resume([path])

    monkeypatch.setattr(checkpoint.subprocess, "run", resume_from_torn)
    arguments = ["--opt-level", "O2", "--optimizer", "SGD", "--steps", "12", "--stop", "8", "--device", "cpu"]
    assert checkpoint.main(arguments) == 1
    printed = capsys.readouterr().out
    assert rows_of(printed)[0][-1] == "differs"
    assert f"O2, SGD: [{part!r}]" in printed
    assert printed.rstrip().endswith("a resumed run differs")


def test_checkpoint_refuses_a_stop_after_the_end(example: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example("checkpoint").parse(["--steps", "5", "--stop", "6"])
    assert "--stop 6 is not between 0 and --steps 5" in capsys.readouterr().err


# -- FP16_Optimizer --


def test_fp16_optimizer_prints_a_table() -> None:
    rows = rows_of(run("fp16_optimizer.py", "--epochs", "3", "--device", "cpu"))
    assert [row[0] for row in rows] == ["1", "2", "3"]
    accuracies, rates, scales, norms, skips = ([float(row[i]) for row in rows] for i in range(2, 7))
    assert accuracies[-1] > 90
    assert rates == pytest.approx([0.2, 0.15, 0.05])
    assert all(norm > 0 for norm in norms)
    # The scale begins at 2**20, and is halved by each skip.
    assert skips[0] > 0
    assert [scale * 2**skip for scale, skip in zip(scales, skips, strict=True)] == [2.0**20] * 3


def test_fp16_optimizer_takes_a_closure_and_a_static_scale(example: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    main = example("fp16_optimizer").main
    assert main(["--optimizer", "LBFGS", "--epochs", "2", "--loss-scale", "128", "--device", "cpu"]) == 0
    first, second = rows_of(capsys.readouterr().out)
    assert float(second[1]) < float(first[1]) / 2
    assert first[4:] == second[4:] == ["128", "-", "0"]


# -- digits --


def test_digits_trains_at_all_levels() -> None:
    tiny = ("--all-levels", "--seeds", "1", "--epochs", "6", "--dtype", "bf16", "--device", "cpu", "--json")
    modes = json.loads(run("digits.py", *tiny))["modes"]
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
