"""Train a small convnet on scikit-learn's handwritten digits in fp32 and in mixed precision, and compare.

The data are 1797 real images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded. Each mode trains the
same net from the same seeds on the same split. `--all-levels` adds the opt levels O1 and O2, and `FP16_Optimizer`. The
exit code is 1 where the mean test accuracy of a mixed-precision
mode differs from that of fp32 by more than half a point.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

import autoamp
from autoamp.fp16_utils import network_to_half

TEST_IMAGES = 600
BATCH = 128
PEAK_LEARNING_RATE = 1e-2
TOLERANCE = 0.5
CAPTION = (
    "Accuracy: mean of the seeds ± standard deviation. Saved for backward: by one training step; half-precision "
    "copies of the weights count, the parameters themselves do not. Scale: of the loss, at the end. Skipped and "
    "seconds: sums over the seeds."
)
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("epochs"),
    TimeElapsedColumn(),
)
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Digits:
    """The images (N, 1, 8, 8) fp32 in 0..1 and their labels (N,) int64, split once and for all."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        """Read the digits and hold out `TEST_IMAGES` of them, the same ones in every run."""
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
        labels = torch.tensor(bunch.target, dtype=torch.int64, device=device)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
        test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
        return cls(images[train], labels[train], images[test], labels[test])


def make_net() -> nn.Module:
    """Return a convnet of some 70,000 weights from (N, 1, 8, 8) images to (N, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Precision(Protocol):
    """What a training loop needs to know of the precision that it runs in."""

    @property
    def model(self) -> nn.Module:
        """The model to train."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer to train it with."""

    @property
    def loss_scale(self) -> float:
        """The scale of the loss as it is now."""

    @property
    def skipped_steps(self) -> int:
        """How many steps overflowed and were not taken."""

    def backward(self, loss: Tensor) -> None:
        """Leave the gradients of `loss` in the optimizer's parameters."""


@dataclass(frozen=True)
class FullPrecision:
    """Plain PyTorch."""

    model: nn.Module
    optimizer: Optimizer
    loss_scale: ClassVar[float] = 1.0
    skipped_steps: ClassVar[int] = 0

    def backward(self, loss: Tensor) -> None:
        """Run an ordinary backward pass."""
        loss.backward()


@dataclass(frozen=True)
class Handled:
    """Half precision by a handle: `init()` patches torch, an opt level may also cast the model. The loss is scaled."""

    model: nn.Module
    optimizer: Optimizer
    handle: autoamp.Handle | autoamp.NoOpHandle

    @property
    def loss_scale(self) -> float:
        """The scale of the first loss, which here is the only one."""
        return self.handle.loss_scale

    @property
    def skipped_steps(self) -> int:
        """The handle's count: it was made for this run alone."""
        return self.handle.skipped_steps

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss; the handle unscales the gradients afterwards."""
        with self.handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()


class ByHand:
    """A model in fp16 without a handle: `FP16_Optimizer` has the master weights and scales the loss."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = network_to_half(model)
        self.optimizer = autoamp.FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        self.skipped_steps = 0
        self.optimizer.register_step_post_hook(self._count)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss as it is now."""
        return self.optimizer.loss_scale

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss."""
        self.optimizer.backward(loss)

    def _count(self, *_: object) -> None:
        self.skipped_steps += self.optimizer.overflow


MakePrecision = Callable[[nn.Module, Optimizer], contextlib.AbstractContextManager[Precision]]


@contextlib.contextmanager
def full_precision(model: nn.Module, optimizer: Optimizer) -> Iterator[Precision]:
    """Train in fp32."""
    yield FullPrecision(model, optimizer)


@contextlib.contextmanager
def by_hand(model: nn.Module, optimizer: Optimizer) -> Iterator[Precision]:
    """Train with `FP16_Optimizer`."""
    yield ByHand(model, optimizer)


def cast_lists(dtype: torch.dtype, device: torch.device) -> MakePrecision:
    """Train under `autoamp.init()`, which patches torch until the run ends."""

    @contextlib.contextmanager
    def precision(model: nn.Module, optimizer: Optimizer) -> Iterator[Precision]:
        handle = autoamp.init(dtype=dtype, device_type=device.type)
        try:
            yield Handled(model, optimizer, handle)
        finally:
            handle.deactivate()

    return precision


def opt_level(level: str, dtype: torch.dtype, device: torch.device) -> MakePrecision:
    """Train at an opt level until the run ends."""

    @contextlib.contextmanager
    def precision(model: nn.Module, optimizer: Optimizer) -> Iterator[Precision]:
        model, optimizer = autoamp.initialize(model, optimizer, opt_level=level, dtype=dtype, device_type=device.type)
        handle = autoamp.current_handle() or autoamp.NoOpHandle()
        try:
            yield Handled(model, optimizer, handle)
        finally:
            handle.deactivate()

    return precision


@dataclass(frozen=True)
class Mode:
    """A row of the table: its name, and what puts the precision in place for one run."""

    name: str
    precision: MakePrecision


@dataclass(frozen=True)
class Run:
    """What one training run came to. The accuracy is in percent, the time in seconds."""

    accuracy: float
    saved_bytes: int
    skipped_steps: int
    loss_scale: float
    seconds: float


class SavedBytes:
    """Counts what autograd keeps for the backward pass, each storage once.

    The parameters themselves are left out, since they are in memory in any case; the half-precision copies that mixed
    precision makes of them are counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        # The storages are held, so that no address is given out twice while counting.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage
        return tensor

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Count what is saved within the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """The bytes counted so far."""
        return sum(storage.nbytes() for storage in self._storages.values())


def train(mode: Mode, digits: Digits, epochs: int, seed: int, tick: Callable[[], None]) -> Run:
    """Train one net from `seed`, call `tick` after each epoch, and measure it on the test images."""
    torch.manual_seed(seed)
    model = make_net().to(digits.train_images.device)
    images = len(digits.train_images)
    with mode.precision(model, torch.optim.Adam(model.parameters())) as precision:
        model, optimizer = precision.model, precision.optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, PEAK_LEARNING_RATE, total_steps=epochs * math.ceil(images / BATCH)
        )
        saved = SavedBytes(model)
        watching = saved.watching()
        start = time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(images)
            for first in range(0, images, BATCH):
                picked = order[first : first + BATCH]
                optimizer.zero_grad()
                with watching:
                    logits = model(digits.train_images[picked]).float()
                    loss = F.cross_entropy(logits, digits.train_labels[picked])
                # The first step is enough: every step saves the same.
                watching = contextlib.nullcontext()
                precision.backward(loss)
                optimizer.step()
                schedule.step()
            tick()
        # The accuracy waits for the device, so the clock stops after it.
        percent = accuracy(model, digits)
        seconds = time.perf_counter() - start
        return Run(percent, saved.total, precision.skipped_steps, precision.loss_scale, seconds)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the percentage of test images that the model names rightly."""
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return 100 * int(right.sum()) / len(right)


def mean_accuracy(runs: Sequence[Run]) -> float:
    """Return the mean test accuracy of several seeds, in percent."""
    return statistics.fmean(run.accuracy for run in runs)


def deviations(results: dict[str, list[Run]], reference: str = "fp32") -> dict[str, float]:
    """Return by how many points each mode's mean accuracy is off the reference's, for modes beyond `TOLERANCE`."""
    expected = mean_accuracy(results[reference])
    off = {name: mean_accuracy(runs) - expected for name, runs in results.items()}
    return {name: points for name, points in off.items() if abs(points) > TOLERANCE}


def as_table(results: dict[str, list[Run]], title: str) -> Table:
    """Lay the results out, a row for each mode."""
    table = Table(title=title, caption=CAPTION, caption_justify="left")
    table.add_column("mode", no_wrap=True)
    for heading in ("test accuracy %", "saved for backward", "skipped", "scale", "seconds"):
        table.add_column(heading, justify="right")
    for name, runs in results.items():
        accuracies = [run.accuracy for run in runs]
        table.add_row(
            name,
            f"{mean_accuracy(runs):.2f} ± {statistics.pstdev(accuracies):.2f}",
            f"{runs[-1].saved_bytes / 2**10:,.0f} KiB",
            str(sum(run.skipped_steps for run in runs)),
            f"{runs[-1].loss_scale:g}",
            f"{sum(run.seconds for run in runs):.1f}",
        )
    return table


def make_modes(dtypes: Iterable[str], device: torch.device, *, all_levels: bool) -> list[Mode]:
    """Return fp32, the cast lists in each dtype, and if asked the opt levels and `FP16_Optimizer`."""
    modes = [Mode("fp32", full_precision)]
    modes += [Mode(name, cast_lists(HALF_DTYPES[name], device)) for name in dtypes]
    if all_levels:
        modes += [
            Mode(f"{level} {name}", opt_level(level, HALF_DTYPES[name], device))
            for level in ("O1", "O2")
            for name in dtypes
        ]
        modes.append(Mode("FP16_Optimizer", by_hand))
    return modes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=16, help="passes over the training images")
    parser.add_argument("--seeds", type=positive, default=3, help="how many runs each mode has")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--dtype", nargs="+", choices=HALF_DTYPES, default=list(HALF_DTYPES), help="modes beside fp32")
    parser.add_argument("--all-levels", action="store_true", help="add O1 and O2 in these dtypes, and FP16_Optimizer")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train every mode, print the table, and return the exit code."""
    options = parse(arguments)
    device = torch.device(options.device)
    # The net is so small that several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    digits = Digits.load(device)
    modes = make_modes(dict.fromkeys(options.dtype), device, all_levels=options.all_levels)
    results: dict[str, list[Run]] = {mode.name: [] for mode in modes}
    with Progress(*COLUMNS, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("training", total=len(modes) * options.seeds * options.epochs)
        for mode in modes:
            for seed in range(options.seeds):
                progress.update(task, description=f"{mode.name}, seed {seed}")
                results[mode.name].append(train(mode, digits, options.epochs, seed, lambda: progress.advance(task)))
    console = Console()
    console.print(as_table(results, f"digits on {device}, epochs: {options.epochs}, seeds: {options.seeds}"))
    off = deviations(results)
    for name, points in off.items():
        console.print(f"{name} is {points:+.2f} points off fp32; at most {TOLERANCE} are allowed")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
