"""Train a ResNet at an opt level, on a directory of images or on synthetic ones, on one device or on several.

    python examples/imagenet.py
    python examples/imagenet.py data --arch resnet50 --opt-level O2 --batch-size 256 --workers 8 --save last.pt
    python examples/imagenet.py data --arch resnet50 --opt-level O2 --batch-size 256 --workers 8 --resume last.pt
    torchrun --nproc-per-node 8 examples/imagenet.py data --arch resnet50 --opt-level O2 --workers 8

The first line trains on synthetic images, in under a minute on two CPU cores. `data` holds `train/<class>/*.png` or
`.jpg`, and `val/<class>/...`; reading it needs Pillow. A run that was stopped after an epoch and resumed is bitwise the
run that was not: the order of the images and their augmentation depend on the seed and the epoch alone.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from processes import leave
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import autoamp

# What a run takes that is not told otherwise: the usual recipe, or one that is quick on a CPU.
DIRECTORY_DEFAULTS = {"epochs": 90, "batch_size": 256, "image_size": 224, "lr": 0.1}
SYNTHETIC_DEFAULTS = {"epochs": 3, "batch_size": 32, "image_size": 32, "lr": 0.05}
SYNTHETIC_CLASSES = 10
# Five layers halve the image, the last of which must find two pixels.
SMALLEST_IMAGE = 32
DECAY_EPOCHS = 30
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("batches"),
    TimeElapsedColumn(),
)

Batch = tuple[Tensor, Tensor]


# -- the model: names of modules and parameters are those of torchvision, so its weights load --


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; He et al., Deep Residual Learning (2015), figure 5 left."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut; figure 5 right, with the stride in the 3 x 3 one."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, 4 width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return what brings a block's input to the shape of its output."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, block: type[BasicBlock | Bottleneck], blocks: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            layers = []
            for index in range(count):
                layers.append(block(inputs, width, 2 if stage and index == 0 else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


ARCHITECTURES: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}


# -- the data: uint8 images (3, size, size) and their labels --


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of a directory that has a folder for each class.

    Args:
        root: Holds ``<class>/*.png``, ``*.jpg`` or ``*.jpeg``.
        classes: The names of the folders, in the order of the labels; None takes all there are.
        size: Height and width of what is returned.
        augmented: Whether to cut and mirror at random, or to take the middle.
        seed: Of the augmentation.
    """

    epoch = 0

    def __init__(self, root: Path, classes: Sequence[str] | None, size: int, *, augmented: bool, seed: int) -> None:
        if not root.is_dir():
            raise SystemExit(f"there is no directory {root}; it should hold <class>/*.png or *.jpg")
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if classes is None else classes
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).glob("*"))
            if path.suffix.lower() in (".png", ".jpg", ".jpeg")
        ]
        if not self.files:
            raise SystemExit(f"{root} has no images; it should hold <class>/*.png or *.jpg")
        self.size = size
        self.augmented = augmented
        self.seed = seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image  # type: ignore[import-not-found, unused-ignore]

        path, label = self.files[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        chance = random.Random(f"{self.seed} {self.epoch} {index}")
        box = random_box(image.size, chance) if self.augmented else middle_box(image.size)
        pixels = np.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box))
        tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return tensor.flip(2) if self.augmented and chance.random() < 0.5 else tensor, label


def random_box(size: tuple[int, int], chance: random.Random) -> tuple[float, float, float, float]:
    """Return the left, upper, right and lower edge of 8 to 100 % of an image, of an aspect ratio from 3/4 to 4/3."""
    width, height = size
    area = width * height * chance.uniform(0.08, 1.0)
    ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, upper = chance.uniform(0, width - wide), chance.uniform(0, height - high)
    return left, upper, left + wide, upper + high


def middle_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the edges of the square in the middle of an image, 7/8 of what fits."""
    width, height = size
    side = min(width, height) * 7 / 8
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Images of noise over a coarse pattern, which is that of their class.

    Args:
        first: The number of the first image: those of another range are other images of the same classes.
        count: How many images there are.
        size: Their height and width.
    """

    epoch = 0

    def __init__(self, first: int, count: int, size: int) -> None:
        self.first = first
        self.count = count
        self.size = size
        coarse = torch.randn(SYNTHETIC_CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % SYNTHETIC_CLASSES
        generator = torch.Generator().manual_seed(self.first + index)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return (128 + 32 * self.patterns[label] + 64 * noise).clamp(0, 255).to(torch.uint8), label


Images = ImageFolder | SyntheticImages


def load_data(options: argparse.Namespace) -> tuple[Images, Images, int]:
    """Return the training images, the validation images and the number of classes."""
    size = options.image_size
    if options.synthetic:
        count = options.images
        return SyntheticImages(0, count, size), SyntheticImages(count, count // 4, size), SYNTHETIC_CLASSES
    train = ImageFolder(options.data / "train", None, size, augmented=True, seed=options.seed)
    val = ImageFolder(options.data / "val", train.classes, size, augmented=False, seed=options.seed)
    return train, val, len(train.classes)


def on_device(loader: DataLoader[Any], device: torch.device) -> Iterator[Batch]:
    """Yield batches of normalised fp32 images and their labels; on a GPU each is fetched while the last one is used."""
    mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION))

    def upload(batch: Sequence[Tensor]) -> Batch:
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        return (images / 255 - mean) / deviation, labels

    return prefetched(loader, upload, device) if device.type == "cuda" else map(upload, loader)


def prefetched(
    loader: DataLoader[Any], upload: Callable[[Sequence[Tensor]], Batch], device: torch.device
) -> Iterator[Batch]:
    """Yield uploaded batches, each uploaded on a stream of its own while the one before is used."""
    stream = torch.cuda.Stream(device)
    # The constants of `upload` were made on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    source = iter(loader)

    def fetch() -> Batch | None:
        batch = next(source, None)
        with torch.cuda.stream(stream):
            return None if batch is None else upload(batch)

    ahead = fetch()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in ahead:
            # Its memory is not given to the next upload before this stream is done with it.
            tensor.record_stream(current)
        batch, ahead = ahead, fetch()
        yield batch


# -- where it runs --


@dataclass(frozen=True)
class Place:
    """One process of a run: its device, its number, and how many there are."""

    device: torch.device
    rank: int
    world: int

    @classmethod
    def find(cls, device: str) -> Place:
        """Join the other processes where torchrun started several."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", place.index or 0)))
            torch.cuda.set_device(place)
        if world > 1:
            distributed.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(place, rank, world)

    def leave(self) -> None:
        """Part from the other processes."""
        if self.world > 1:
            leave()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Let the gradients be averaged over all processes. Only after `autoamp.initialize`."""
        if self.world == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)

    def total(self, values: Tensor) -> list[float]:
        """Return the sums of values over all processes."""
        if self.world > 1:
            distributed.all_reduce(values)
        return [float(value) for value in values]


# -- training --


def learning_rate(options: argparse.Namespace, epoch: int, world: int) -> float:
    """Return ``--lr`` per 256 images of a step, a tenth of it every `DECAY_EPOCHS` epochs."""
    return float(options.lr * options.batch_size * world / 256 * 0.1 ** (epoch // DECAY_EPOCHS))


def train(model: nn.Module, optimizer: Optimizer, batches: Iterator[Batch], place: Place) -> float:
    """Train for one epoch and return the mean loss."""
    model.train()
    sums = torch.zeros(2, device=place.device)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with autoamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        sums += torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float32)])
    total, count = place.total(sums)
    return total / count


@torch.no_grad()
def validate(model: nn.Module, batches: Iterator[Batch], place: Place) -> tuple[float, float]:
    """Return the mean loss and the top-1 accuracy in percent."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=place.device)
    for images, labels in batches:
        logits = model(images).float()
        right = (logits.argmax(dim=1) == labels).sum()
        sums += torch.stack([F.cross_entropy(logits, labels, reduction="sum"), right, torch.tensor(len(labels))]).to(
            sums
        )
    loss, right, count = place.total(sums)
    return loss / count, 100 * right / count


class Training:
    """A model and its optimizer, with all that a checkpoint holds.

    Attributes:
        epoch: How many epochs are done.
        best: The best top-1 accuracy so far, in percent.
    """

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options = options
        self.place = place
        self.epoch = 0
        self.best = 0.0
        self.train_images, self.val_images, classes = load_data(options)
        torch.manual_seed(options.seed)
        block, blocks = ARCHITECTURES[options.arch]
        model = ResNet(block, blocks, classes).to(place.device)
        optimizer = torch.optim.SGD(
            model.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
        self.model, self.optimizer = autoamp.initialize(
            model,
            optimizer,
            opt_level=options.opt_level,
            keep_batchnorm_fp32=options.keep_batchnorm_fp32,
            loss_scale=options.loss_scale,
            dtype=HALF_DTYPES.get(options.dtype),
            device_type=place.device.type,
        )
        if options.resume:
            self.load(options.resume)
        self.parallel = place.wrap(self.model)
        # Each process has its share: in training all are of one length, in validation each image comes once.
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            self.train_images, place.world, place.rank, seed=options.seed, drop_last=place.world > 1
        )
        share = Subset(self.val_images, range(place.rank, len(self.val_images), place.world))
        pinned = place.device.type == "cuda"
        self.train_loader: DataLoader[Any] = DataLoader(
            self.train_images, options.batch_size, sampler=self.sampler, num_workers=options.workers,
            pin_memory=pinned, drop_last=True,
        )  # fmt: skip
        self.val_loader: DataLoader[Any] = DataLoader(
            share, options.batch_size, num_workers=options.workers, pin_memory=pinned
        )
        if not self.train_loader:
            raise SystemExit(f"{len(self.train_images)} training images are less than one batch; lower --batch-size")

    def run_epoch(self, progress: Progress) -> str:
        """Train and validate, and return a line about it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.epoch, self.place.world)
        self.train_images.epoch = self.epoch
        self.sampler.set_epoch(self.epoch)
        start = time.perf_counter()
        train_loss = train(
            self.parallel, self.optimizer, self._batches(self.train_loader, "training", progress), self.place
        )
        rate = len(self.train_loader) * self.options.batch_size * self.place.world / (time.perf_counter() - start)
        # The wrapper would wait for processes that have no more batches.
        val_loss, top1 = validate(self.model, self._batches(self.val_loader, "validation", progress), self.place)
        self.epoch += 1
        self.best = max(self.best, top1)
        amp = autoamp.state_dict()
        return (
            f"epoch {self.epoch}/{self.options.epochs}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, "
            f"top-1 {top1:.2f} %, {rate:.0f} images/s, loss scale {amp['loss_scaler0']['loss_scale']:g}, "
            f"skipped {amp['skipped_steps']}"
        )

    def _batches(self, loader: DataLoader[Any], what: str, progress: Progress) -> Iterator[Batch]:
        task = progress.add_task(f"epoch {self.epoch + 1}, {what}", total=len(loader))
        for batch in on_device(loader, self.place.device):
            yield batch
            progress.advance(task)

    def save(self, path: Path) -> None:
        """Write a checkpoint: all of it, or the file stays as it was."""
        state = {
            "epoch": self.epoch,
            "best": self.best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": autoamp.state_dict(),
        }
        part = path.with_name(f"{path.name}.part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(path, map_location=self.place.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        autoamp.load_state_dict(state["amp"])
        self.epoch, self.best = state["epoch"], state["best"]


# -- the command line --


def loss_scale(text: str) -> float | str:
    """Read ``dynamic`` or a number."""
    return text if text == "dynamic" else float(text)


def boolean(text: str) -> bool:
    """Read ``True`` or ``False``."""
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return values[text.lower()]


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("data", nargs="?", type=Path, help="a directory with train/<class>/*.png and val/<class>/*.png, or .jpg")
    add("--synthetic", action="store_true", help="train on synthetic images (default: if no directory is given)")
    add("--images", type=positive, default=320, help="how many synthetic images an epoch has (default: %(default)s)")
    add("--arch", choices=ARCHITECTURES, default="resnet18", help="the layout of the net (default: %(default)s)")
    add("--opt-level", choices=["O0", "O1", "O2", "O3"], default="O1", help="default: %(default)s")
    add("--keep-batchnorm-fp32", type=boolean, metavar="{True,False}", help="default: the opt level's")
    add("--loss-scale", type=loss_scale, metavar="{dynamic,NUMBER}", help="default: the opt level's")
    add(
        "--dtype",
        choices=HALF_DTYPES,
        help="the half precision (default: fp16 on a GPU, bf16 on a CPU; there fp16 is slow)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    for name, kind, text in (
        ("epochs", positive, "passes over the training images"),
        ("batch-size", positive, "images a step, in each process"),
        ("image-size", positive, "pixels a side"),
        ("lr", float, f"the learning rate per 256 images of a step; a tenth of it every {DECAY_EPOCHS} epochs"),
    ):
        usual, quick = (defaults[name.replace("-", "_")] for defaults in (DIRECTORY_DEFAULTS, SYNTHETIC_DEFAULTS))
        add(f"--{name}", type=kind, help=f"{text} (default: {usual}, on synthetic images {quick})")
    add("--momentum", type=float, default=0.9, help="default: %(default)s")
    add("--weight-decay", type=float, default=1e-4, help="default: %(default)s")
    add("--workers", type=int, default=0, help="processes that read images; 0 reads in this one (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, order and augmentation (default: %(default)s)")
    add("--save", type=Path, metavar="FILE", help="where to write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE", help="a checkpoint to go on from")
    options = parser.parse_args(arguments)
    if options.synthetic and options.data:
        parser.error(f"give the directory {options.data} or --synthetic, not both")
    options.synthetic = options.data is None
    for name, value in (SYNTHETIC_DEFAULTS if options.synthetic else DIRECTORY_DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.image_size < SMALLEST_IMAGE:
        parser.error(
            f"--image-size {options.image_size} leaves nothing to the last stage; give {SMALLEST_IMAGE} or more"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print a line after each epoch, and return the exit code."""
    options = parse(arguments)
    place = Place.find(options.device)
    console, progress_console = Console(quiet=place.rank > 0, soft_wrap=True), Console(stderr=True)
    # What is no terminal would get an empty line from each.
    hidden = place.rank > 0 or not progress_console.is_terminal
    training = Training(options, place)
    console.print(
        f"{options.arch} at {options.opt_level} on {place.world} x {place.device.type}: "
        f"{len(training.train_images)} training and {len(training.val_images)} validation images"
    )
    while training.epoch < options.epochs:
        with Progress(*COLUMNS, console=progress_console, transient=True, disable=hidden) as progress:
            line = training.run_epoch(progress)
        console.print(line)
        if options.save and place.rank == 0:
            training.save(options.save)
    console.print(f"best top-1: {training.best:.2f} %")
    place.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
