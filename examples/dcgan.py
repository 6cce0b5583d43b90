"""Train a DCGAN: two nets, two optimizers and three losses, each with a loss scale of its own.

    python examples/dcgan.py
    python examples/dcgan.py --opt-level O2 --dtype bf16 --epochs 30 --out digits.png

The data are scikit-learn's handwritten digits, or made on the spot with `--synthetic`. The discriminator has a loss on
real and one on generated images; it takes one step for the two. The two optimizers skip steps apart.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

import autoamp

NOISE = 32
WIDTH = 16
# The losses by their loss_id.
REAL, FAKE, GENERATOR = range(3)
# The smoothed label of real images: a discriminator that is sure of itself teaches nothing.
REAL_LABEL = 0.9
SYNTHETIC_IMAGES = 1024
GRID = 8
ENLARGED = 4
CAPTION = (
    "D on real, D on fake: how probably real the discriminator finds them. Scales: of its losses on real and on fake "
    "images, and of the generator's. Skipped: steps that overflowed."
)
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("epochs"),
    TimeElapsedColumn(),
)


def make_generator() -> nn.Module:
    """Return a net from noise (N, NOISE, 1, 1) to images (N, 1, 8, 8) in -1..1."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * WIDTH, 2, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    """Return a net from images (N, 1, 8, 8) to logits (N,): above 0 for images that it takes for real."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 1, 2),
        nn.Flatten(start_dim=0),
    )


def initial_weights(module: nn.Module) -> None:
    """Draw the weights of a layer; Radford et al., Unsupervised representation learning (2015), section 4."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.05)


def real_images(*, synthetic: bool) -> Tensor:
    """Return images (N, 1, 8, 8) fp32 in -1..1: handwritten digits, or bright spots on a dark ground."""
    if synthetic:
        centre = torch.rand(SYNTHETIC_IMAGES, 2, 1, 1, generator=torch.Generator().manual_seed(0)) * 5 + 1
        rows, columns = torch.arange(8.0).view(1, 8, 1), torch.arange(8.0).view(1, 1, 8)
        distance = (rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2
        return (2 * torch.exp(-distance / 3) - 1).unsqueeze(1)
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


@dataclass
class Epoch:
    """Sums over the steps of an epoch.

    Attributes:
        losses: The three losses, by ``loss_id``.
        real: How probably real the discriminator found real images.
        fake: The same of generated ones, before its step.
        skipped: Steps of the discriminator and of the generator that overflowed and were not taken.
        steps: How many steps each of the two had.
    """

    losses: Tensor
    real: Tensor
    fake: Tensor
    skipped: list[int]
    steps: int = 0


class Gan:
    """The two nets and their optimizers, initialised together at an opt level."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.device = torch.device(options.device)
        nets = [net.apply(initial_weights).to(self.device) for net in (make_discriminator(), make_generator())]
        optimizers = [torch.optim.Adam(net.parameters(), options.lr, betas=(0.5, 0.999), eps=1e-6) for net in nets]
        (self.discriminator, self.generator), (self.optimizer_d, self.optimizer_g) = autoamp.initialize(
            nets,
            optimizers,
            opt_level=options.opt_level,
            num_losses=3,
            dtype=HALF_DTYPES[options.dtype],
            device_type=self.device.type,
        )
        # The logits go into the sigmoid and the logarithm at once: apart they overflow in half precision.
        self.criterion = nn.BCEWithLogitsLoss()

    def epoch(self, images: Tensor, batch: int) -> Epoch:
        """Train on all images once, in an order drawn anew."""
        zero = torch.zeros((), device=self.device)
        result = Epoch(torch.zeros(3, device=self.device), zero.clone(), zero.clone(), [0, 0])
        for picked in torch.randperm(len(images)).split(batch):
            self.step(images[picked], result)
        return result

    def step(self, real: Tensor, result: Epoch) -> None:
        """Take one step of the discriminator and one of the generator, and add to the sums."""
        fake = self.generator(torch.randn(len(real), NOISE, 1, 1, device=self.device))

        # The generator's last loss left gradients here as well.
        self.optimizer_d.zero_grad()
        real_logits = self.discriminator(real)
        loss_real = self.loss(real_logits, REAL_LABEL)
        with autoamp.scale_loss(loss_real, self.optimizer_d, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        fake_logits = self.discriminator(fake.detach())
        loss_fake = self.loss(fake_logits, 0.0)
        with autoamp.scale_loss(loss_fake, self.optimizer_d, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()
        result.skipped[0] += took_no_step(self.optimizer_d)

        self.optimizer_g.zero_grad()
        loss_generator = self.loss(self.discriminator(fake), 1.0)
        with autoamp.scale_loss(loss_generator, self.optimizer_g, loss_id=GENERATOR) as scaled_loss:
            scaled_loss.backward()
        result.skipped[1] += took_no_step(self.optimizer_g)

        result.losses += torch.stack([loss_real, loss_fake, loss_generator]).detach()
        result.real += real_logits.detach().float().sigmoid().mean()
        result.fake += fake_logits.detach().float().sigmoid().mean()
        result.steps += 1

    def loss(self, logits: Tensor, label: float) -> Tensor:
        """Return the cross entropy, where the right answer for each image is `label`."""
        loss: Tensor = self.criterion(logits, torch.full_like(logits, label))
        return loss

    @torch.no_grad()
    def draw(self, count: int) -> Tensor:
        """Return `count` generated images (count, 1, 8, 8) in -1..1."""
        self.generator.eval()
        images: Tensor = self.generator(torch.randn(count, NOISE, 1, 1, device=self.device)).float().cpu()
        self.generator.train()
        return images


def took_no_step(optimizer: Optimizer) -> bool:
    """Let an optimizer step, and tell whether it skipped."""
    optimizer.step()
    handle = autoamp.current_handle()
    return handle is not None and handle.last_step_skipped


def write_png(path: Path, images: Tensor) -> None:
    """Write images (GRID * GRID, 1, H, W) in -1..1 as a grid, each pixel enlarged, into a greyscale PNG."""
    images = F.pad(images, (1, 1, 1, 1), value=-1.0)
    _, _, height, width = images.shape
    grid = images.view(GRID, GRID, height, width).transpose(1, 2).reshape(GRID * height, GRID * width)
    grid = grid.repeat_interleave(ENLARGED, 0).repeat_interleave(ENLARGED, 1)
    pixels = ((grid + 1) * 127.5).round().to(torch.uint8)
    # Each row begins with the number of its filter; 0 is none.
    rows = torch.cat([torch.zeros(len(pixels), 1, dtype=torch.uint8), pixels], dim=1)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes())), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def make_table(title: str) -> Table:
    """Return the table without rows."""
    table = Table(title=title, caption=CAPTION, caption_justify="left")
    for heading in (
        "epoch",
        "loss\nreal",
        "loss\nfake",
        "loss\nG",
        "D on\nreal",
        "D on\nfake",
        "scales",
        "skipped\nD, G",
    ):
        table.add_column(heading, justify="right")
    return table


def as_row(number: int, epoch: Epoch) -> list[str]:
    """Return the cells of an epoch's row."""
    means = torch.stack([*epoch.losses, epoch.real, epoch.fake]) / epoch.steps
    state = autoamp.state_dict()
    scales = " ".join(f"{state[f'loss_scaler{loss_id}']['loss_scale']:g}" for loss_id in (REAL, FAKE, GENERATOR))
    return [str(number), *(f"{mean:.3f}" for mean in means.tolist()), scales, ", ".join(map(str, epoch.skipped))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--synthetic", action="store_true", help="train on images that are made, not on digits")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2", "O3"], default="O1", help="O0 to O3")
    parser.add_argument("--dtype", choices=HALF_DTYPES, default="fp16", help="the half precision")
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the images")
    parser.add_argument("--batch-size", type=positive, default=64, help="images a step")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learning rate of both optimizers")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write generated images as PNG")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print a table with a row for each epoch, and return the exit code."""
    options = parse(arguments)
    # The nets are so small that several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    images = real_images(synthetic=options.synthetic).to(options.device)
    gan = Gan(options)
    table = make_table(f"{len(images)} images, {options.opt_level} with {options.dtype} on {options.device}")
    with Progress(*COLUMNS, console=Console(stderr=True), transient=True) as progress:
        for number in progress.track(range(1, options.epochs + 1), description="training"):
            table.add_row(*as_row(number, gan.epoch(images, options.batch_size)))
    console = Console()
    console.print(table)
    if options.out:
        write_png(options.out, gan.draw(GRID * GRID))
        console.print(f"wrote {GRID * GRID} generated images to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
