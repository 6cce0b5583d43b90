"""Train a net in half precision by hand: `FP16_Optimizer` keeps the fp32 masters and scales the loss.

    python examples/fp16_optimizer.py
    python examples/fp16_optimizer.py --optimizer Adam --loss-scale 1024 --max-norm 1
    python examples/fp16_optimizer.py --optimizer LBFGS

Nothing of torch is patched. `network_to_half` calls `model.half()`, puts batch norms back into fp32 and casts the
input; the loss is taken in fp32. With LBFGS `step` gets a closure, which it calls many times. The data are
scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from autoamp import FP16_Optimizer
from autoamp.fp16_utils import network_to_half

TEST_IMAGES = 600
BATCH = 64
LEARNING_RATES = {"SGD": 0.2, "Adam": 3e-3, "LBFGS": 1.0}
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("epochs"),
    TimeElapsedColumn(),
)


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (N, 64) fp32 in 0..1, their labels (N,) int64, test images and their labels."""
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def make_optimizer(name: str, model: nn.Module, lr: float) -> Optimizer:
    """Return an ordinary optimizer of half parameters."""
    if name == "SGD":
        return SGD(model.parameters(), lr, momentum=0.9)
    if name == "Adam":
        return Adam(model.parameters(), lr)
    return LBFGS(model.parameters(), lr, max_iter=5, line_search_fn="strong_wolfe")


class Trainer:
    """A net in half precision and its optimizer."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        self.model = network_to_half(net.to(device))
        self.optimizer = FP16_Optimizer(
            make_optimizer(options.optimizer, self.model, options.lr),
            static_loss_scale=options.loss_scale,
            dynamic_loss_scale=options.loss_scale is None,
            # High enough that the first steps are skipped.
            dynamic_loss_args={"init_scale": 2.0**20},
        )
        # It is a torch.optim.Optimizer, so schedulers take it.
        self.schedule = CosineAnnealingLR(self.optimizer, options.epochs)
        self.max_norm = options.max_norm
        self.skipped = 0
        # The last one before clipping; LBFGS clips nothing.
        self.norm: float | None = None

    def evaluate(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, with its unscaled gradients in the masters."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images).float(), labels)
        self.optimizer.backward(loss)
        return loss

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Clip the gradients, take one step and return the loss before."""
        loss = self.evaluate(images, labels)
        norm = self.optimizer.clip_master_grads(self.max_norm)
        # -1 says that the gradients overflowed; the step is skipped then.
        self.norm = norm if norm >= 0 else self.norm
        self.optimizer.step()
        self.skipped += self.optimizer.overflow
        return loss.item()

    def step_with_closure(self, images: Tensor, labels: Tensor) -> float:
        """Let an optimizer evaluate the loss as often as it likes in one step, and return the loss before."""
        loss = self.optimizer.step(lambda: self.evaluate(images, labels))
        self.skipped += self.optimizer.overflow
        return float(loss.item())

    def epoch(self, images: Tensor, labels: Tensor) -> float:
        """Train on all images once and return the mean loss. LBFGS takes one step, on all images together."""
        if isinstance(self.optimizer.optimizer, LBFGS):
            losses = [self.step_with_closure(images, labels)]
        else:
            batches = torch.randperm(len(images)).split(BATCH)
            losses = [self.step(images[picked], labels[picked]) for picked in batches]
        self.schedule.step()
        return sum(losses) / len(losses)

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the percentage of images that the net names rightly."""
        self.model.eval()
        with torch.no_grad():
            right = int((self.model(images).argmax(dim=1) == labels).sum())
        self.model.train()
        return 100 * right / len(labels)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--optimizer", choices=LEARNING_RATES, default="SGD", help="what steps the masters (default: %(default)s)")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    add("--lr", type=float, help=f"the first learning rate (default: {rates})")
    add("--epochs", type=positive, default=12, help="passes over the training images (default: %(default)s)")
    add("--loss-scale", type=float, metavar="NUMBER", help="a static loss scale (default: a dynamic one)")
    add("--max-norm", type=float, default=2.0, help="clip gradients to this norm, but for LBFGS (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    add(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.lr is None:
        options.lr = LEARNING_RATES[options.optimizer]
    return options


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print a table with a row for each epoch, and return the exit code."""
    options = parse(arguments)
    # The net is so small that several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load_data(torch.device(options.device))
    trainer = Trainer(options, images.device)
    table = Table(title=f"digits in fp16 on {options.device}: FP16_Optimizer over {options.optimizer}")
    for heading in ("epoch", "loss", "accuracy %", "lr", "loss scale", "norm", "skipped"):
        table.add_column(heading, justify="right")
    with Progress(*COLUMNS, console=Console(stderr=True), transient=True) as progress:
        for number in progress.track(range(1, options.epochs + 1), description="training"):
            lr = trainer.optimizer.param_groups[0]["lr"]
            loss = trainer.epoch(images, labels)
            table.add_row(
                str(number),
                f"{loss:.4f}",
                f"{trainer.accuracy(test_images, test_labels):.2f}",
                f"{lr:.4g}",
                f"{trainer.optimizer.loss_scale:g}",
                "-" if trainer.norm is None else f"{trainer.norm:.3f}",
                str(trainer.skipped),
            )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
