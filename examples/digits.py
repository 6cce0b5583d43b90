"""Train a convnet on scikit-learn's handwritten digits in fp32 and in mixed precision, and say what that buys here.

The data are 1797 real images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded. Each mode trains the
same net from the same seeds on the same split, in turn, so that times are compared in pairs. The half dtype is the one
that `autoamp.init()` takes on this device. The last lines say whether it pays, as measured: half precision is faster
where the device has units for it and the net is large enough, and slower elsewhere; compare `--width 8`. `--all-levels`
adds the opt levels O1 and O2 and `FP16_Optimizer`. The exit code is 1 where the mean test accuracy of a mode differs
from that of fp32 by more than half a point.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

import autoamp
from autoamp.fp16_utils import network_to_half

TEST_IMAGES = 600
BATCH = 128
PEAK_LEARNING_RATE = 1e-2
TOLERANCE = 0.5
# Speeds over that of fp32: from the first on mixed precision pays, up to the second it costs time.
PAYS = 1.1
COSTS = 0.9
# Seeds whose speeds differ by more than this factor tell nothing, unless all say the same.
NOISE = 1.5
WIDTH = 64
NARROW = 16
CAPTION = (
    "accuracy on held-out images: mean of the seeds ± standard deviation; kept: for backward by one step, "
    "parameters themselves left out; epoch: median time; speed: fp32's time over this one's, seed by seed: median "
    "(lowest - highest)"
)
HEADINGS = ("mode", "accuracy %", "kept", "epoch", "speed", "skipped")
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


def make_net(width: int) -> nn.Module:
    """Return a convnet from (N, 1, 8, 8) images to (N, 10) logits; at width 64 it has 116,000 weights."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
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
    handle: autoamp.BaseHandle

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


def opt_level(level: Literal["O1", "O2"], dtype: torch.dtype, device: torch.device) -> MakePrecision:
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
    """What one training run came to. The accuracy is in percent, the time that of the median epoch in seconds."""

    accuracy: float
    saved_bytes: int
    skipped_steps: int
    loss_scale: float
    epoch_seconds: float


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


def train(mode: Mode, digits: Digits, options: argparse.Namespace, seed: int) -> Run:
    """Train one net from `seed`, and measure it on the test images."""
    torch.manual_seed(seed)
    model = make_net(options.width).to(digits.train_images.device)
    steps = math.ceil(len(digits.train_images) / BATCH)
    with mode.precision(model, torch.optim.Adam(model.parameters())) as precision:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            precision.optimizer, options.learning_rate, total_steps=options.epochs * steps
        )
        saved = SavedBytes(precision.model)
        with saved.watching():
            loss_of(precision.model, digits, torch.arange(BATCH))
        spent = [train_epoch(precision, digits, schedule) for _ in range(options.epochs)]
        percent = accuracy(precision.model, digits)
        # The first epoch pays for what torch prepares once.
        epoch = statistics.median(spent[1:] or spent)
        return Run(percent, saved.total, precision.skipped_steps, precision.loss_scale, epoch)


def train_epoch(precision: Precision, digits: Digits, schedule: torch.optim.lr_scheduler.LRScheduler) -> float:
    """Train on every image once, in a new order, and return the seconds that it took."""
    start = time.perf_counter()
    for picked in torch.randperm(len(digits.train_images)).split(BATCH):
        precision.optimizer.zero_grad()
        precision.backward(loss_of(precision.model, digits, picked))
        precision.optimizer.step()
        schedule.step()
    if digits.train_images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def loss_of(model: nn.Module, digits: Digits, picked: Tensor) -> Tensor:
    """Return the loss on these training images, which have the indices (N,)."""
    picked = picked.to(digits.train_images.device)
    return F.cross_entropy(model(digits.train_images[picked]).float(), digits.train_labels[picked])


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


# -- what it came to --


@dataclass(frozen=True)
class Compared:
    """A mode beside fp32.

    Attributes:
        speed: fp32's time over the mode's, seed by seed, sorted.
        memory: The part of fp32's bytes that the mode keeps for backward.
        points: How many points its mean accuracy is above fp32's.
    """

    name: str
    speed: tuple[float, ...]
    memory: float
    points: float

    @classmethod
    def of(cls, name: str, runs: Sequence[Run], exact: Sequence[Run]) -> Compared:
        """Compare runs with those of fp32 from the same seeds."""
        speed = sorted(full.epoch_seconds / run.epoch_seconds for full, run in zip(exact, runs, strict=True))
        memory = runs[-1].saved_bytes / exact[-1].saved_bytes
        return cls(name, tuple(speed), memory, mean_accuracy(runs) - mean_accuracy(exact))

    @property
    def times(self) -> str:
        """The median speed and its spread."""
        return f"{statistics.median(self.speed):.2f} ({self.speed[0]:.2f}-{self.speed[-1]:.2f})"

    @property
    def pays(self) -> bool:
        """Whether it is faster than fp32, by the median."""
        return statistics.median(self.speed) >= PAYS

    @property
    def verdict(self) -> str:
        """Whether the mode pays here, in one sentence."""
        low, high = self.speed[0], self.speed[-1]
        middle = statistics.median(self.speed)
        kept = f"{'keeps' if self.memory <= 1 else 'needs'} {abs(1 - self.memory):.0%} "
        kept += f"{'less' if self.memory <= 1 else 'more'} for backward, accuracy {self.points:+.2f} points"
        if len(self.speed) < 2:
            return f"{self.name}: one seed cannot tell whether it is faster: speed {self.times}; it {kept}."
        if high / low > NOISE and low < PAYS and high > COSTS:
            return f"{self.name}: too noisy to tell whether it is faster: speed {self.times}; it {kept}."
        if self.pays:
            return f"{self.name} pays here: {self.times} times the speed of fp32, {kept}."
        if middle <= COSTS:
            return f"{self.name} does not pay here: {self.times} times the speed of fp32; it {kept}."
        return f"{self.name} takes about the time of fp32 here: {self.times} times its speed; it {kept}."


WHERE = (
    "Half precision pays in time where the device has units for it (GPUs with tensor cores; for bf16 CPUs with AMX or "
    "AVX512-BF16 too) and layers are wide enough to keep them busy: `autoamp doctor` measures this device, --width 256 "
    "a wider net."
)


def compared(results: dict[str, list[Run]], reference: str = "fp32") -> list[Compared]:
    """Compare every other mode with the reference."""
    return [Compared.of(name, runs, results[reference]) for name, runs in results.items() if name != reference]


def rows_of(results: dict[str, list[Run]]) -> list[tuple[str, ...]]:
    """Return the cells of the table under `HEADINGS`, a row for each mode."""
    speeds = {one.name: one.times for one in compared(results)}
    return [
        (
            name,
            f"{mean_accuracy(runs):.2f} ± {statistics.pstdev(run.accuracy for run in runs):.2f}",
            f"{runs[-1].saved_bytes / 2**10:,.0f} KiB",
            f"{statistics.median(run.epoch_seconds for run in runs) * 1e3:.0f} ms",
            speeds.get(name, "1"),
            str(sum(run.skipped_steps for run in runs)),
        )
        for name, runs in results.items()
    ]


def print_table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Print the table, by rich where it is installed."""
    if importlib.util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
        for row in (HEADINGS, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print(f"\n{title}. {CAPTION[0].upper()}{CAPTION[1:]}.\n")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print()


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield what tells of the run that begins, on stderr: a bar where rich is installed, else lines."""
    if importlib.util.find_spec("rich") is None:
        done = iter(range(1, total + 1))
        yield lambda what: print(f"run {next(done)} of {total}: {what}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total, completed=-1)
        yield lambda what: bar.update(task, description=what, advance=1)


def as_json(results: dict[str, list[Run]], options: argparse.Namespace) -> str:
    """Return everything that was measured, a JSON object."""
    modes: dict[str, Any] = {name: {"runs": [asdict(run) for run in runs]} for name, runs in results.items()}
    for one in compared(results):
        modes[one.name] |= {**asdict(one), "verdict": one.verdict}
        del modes[one.name]["name"]
    asked = {name: getattr(options, name) for name in ("device", "threads", "width", "epochs", "seeds")}
    return json.dumps({"torch": torch.__version__, **asked, "modes": modes}, indent=2)


# -- the command line --


def make_modes(dtypes: Iterable[str], device: torch.device, *, all_levels: bool) -> list[Mode]:
    """Return fp32, the cast lists in each dtype, and if asked the opt levels and `FP16_Optimizer`."""
    modes = [Mode("fp32", full_precision)]
    modes += [Mode(name, cast_lists(HALF_DTYPES[name], device)) for name in dtypes]
    if all_levels:
        modes += [Mode(f"O1 {name}", opt_level("O1", HALF_DTYPES[name], device)) for name in dtypes]
        modes += [Mode(f"O2 {name}", opt_level("O2", HALF_DTYPES[name], device)) for name in dtypes]
        modes.append(Mode("FP16_Optimizer", by_hand))
    return modes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=8, help="passes over the training images")
    parser.add_argument("--seeds", type=positive, help="how many runs each mode has (default 3; 2 with --all-levels)")
    parser.add_argument("--width", type=positive, help=f"of the net (default {WIDTH}; {NARROW} with --all-levels)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--dtype", nargs="+", choices=HALF_DTYPES, help="modes beside fp32 (default: that of init())")
    parser.add_argument("--all-levels", action="store_true", help="add O1 and O2 in these dtypes, and FP16_Optimizer")
    parser.add_argument("--json", action="store_true", help="print a JSON object in place of the table")
    options = parser.parse_args(arguments)
    options.width = options.width or (NARROW if options.all_levels else WIDTH)
    options.seeds = options.seeds or (2 if options.all_levels else 3)
    if options.dtype is None:
        taken = torch.get_autocast_dtype(torch.device(options.device).type)
        options.dtype = [name for name, dtype in HALF_DTYPES.items() if dtype is taken]
    # Wide layers diverge at the rate that suits narrow ones.
    options.learning_rate = PEAK_LEARNING_RATE * min(1.0, (NARROW / options.width) ** 0.5)
    return options


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train every mode, print the table and the verdict, and return the exit code."""
    options = parse(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    digits = Digits.load(device)
    modes = make_modes(dict.fromkeys(options.dtype), device, all_levels=options.all_levels)
    results: dict[str, list[Run]] = {mode.name: [] for mode in modes}
    with progress(len(modes) * options.seeds) as begin:
        for seed in range(options.seeds):
            for mode in modes:
                begin(f"{mode.name}, seed {seed}")
                results[mode.name].append(train(mode, digits, options, seed))
    if options.json:
        print(as_json(results, options))
    else:
        where = f"{device}, {options.threads} thread" + "s" * (options.threads > 1)
        print_table(f"digits on {where}, epochs: {options.epochs}, seeds: {options.seeds}", rows_of(results))
        for one in compared(results):
            print(one.verdict)
        if not all(one.pays for one in compared(results)):
            print(WHERE)
    off = deviations(results)
    for name, points in off.items():
        print(f"{name} is {points:+.2f} points off fp32; at most {TOLERANCE} are allowed", file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
