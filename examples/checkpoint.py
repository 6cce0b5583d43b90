"""Stop a run in the middle, resume it in a new process, and compare it bit for bit with a run that never stopped.

    python examples/checkpoint.py
    python examples/checkpoint.py --opt-level O2 --optimizer Adam --dtype bf16 --steps 50 --stop 13

A checkpoint holds five things: the model, the optimizer, amp (loss scales and skips), the random number generator that
dropout draws from, and how many steps were taken. The loss scale starts too high and grows often, so that in fp16 steps
are skipped before and after the stop. The exit code is 1 where any bit of a resumed run differs.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import autoamp

FEATURES = 16
CLASSES = 4
BATCH = 32
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = ("SGD", "Adam", "AdamW")
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))


@dataclass(frozen=True)
class Recipe:
    """What a run is made of."""

    opt_level: Literal["O0", "O1", "O2", "O3"]
    optimizer: str
    dtype: str
    device: str
    steps: int


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Return an optimizer with state: momentum, or the moments of Adam."""
    if name == "SGD":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The usual eps of 1e-8 is 0 in fp16, in which O3 steps.
    kind = Adam if name == "Adam" else AdamW
    return kind(model.parameters(), lr=1e-2, eps=1e-4)


def make_batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the features (N, FEATURES) and labels (N,) of a step, the same ones in every run."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    return features.to(device), features[:, :CLASSES].argmax(dim=1).to(device)


class Run:
    """A training run that can be saved and loaded after any step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.step = 0
        self.loss = 0.0
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
        ).to(recipe.device)
        self.model, self.optimizer = autoamp.initialize(
            model,
            make_optimizer(recipe.optimizer, model),
            opt_level=recipe.opt_level,
            # The default of O3 is False, and in fp16 a running variance soon stops moving.
            keep_batchnorm_fp32=True if recipe.opt_level == "O3" else None,
            loss_scale=autoamp.DynamicLossScaler(init_scale=2.0**24, growth_interval=4),
            dtype=HALF_DTYPES[recipe.dtype],
            device_type=torch.device(recipe.device).type,
        )

    def train(self, until: int) -> None:
        """Go on to a step."""
        while self.step < until:
            features, labels = make_batch(self.step, self.recipe.device)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(features), labels)
            with autoamp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
            self.step += 1
            self.loss = loss.item()

    def state_dict(self) -> dict[str, Any]:
        """Return all that it takes to go on."""
        return {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "loss": self.loss,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": autoamp.state_dict(),
            "random": random_states(self.recipe.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. The order of the parts does not matter."""
        self.step = state["step"]
        self.loss = state["loss"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        autoamp.load_state_dict(state["amp"])
        load_random_states(state["random"], self.recipe.device)


def random_states(device: str) -> list[Tensor]:
    """Return the states of the random number generators that a run draws from."""
    on_gpu = torch.device(device).type == "cuda"
    return [torch.get_rng_state(), torch.cuda.get_rng_state(device)] if on_gpu else [torch.get_rng_state()]


def load_random_states(states: Sequence[Tensor], device: str) -> None:
    """Put the generators into these states."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def finished(path: Path) -> Path:
    """Return the file for the end of the run that a checkpoint belongs to."""
    return path.with_suffix(".finished")


def resume(paths: Sequence[Path]) -> None:
    """Go on from checkpoints to the end, and write down where each run arrived."""
    for path in paths:
        state = torch.load(path)
        run = Run(Recipe(**state["recipe"]))
        run.load_state_dict(state)
        run.train(run.recipe.steps)
        torch.save(run.state_dict(), finished(path))


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Yield where two nests of dicts, lists, tensors and numbers differ; tensors are compared byte by byte."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and list(ours) == list(theirs):
        for key in ours:
            yield from differences(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(our, their, f"{where}[{index}]")
    elif isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or as_bytes(ours) != as_bytes(theirs):
            yield where
    elif ours != theirs:
        yield where


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bits of a tensor: unlike ``==`` they tell 0 from -0, and a nan is itself."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def compare(recipe: Recipe, uninterrupted: Mapping[str, Any], checkpoint: Path) -> tuple[list[str], list[str]]:
    """Return the cells of a recipe's row, and where its two runs differ."""
    stopped, resumed = torch.load(checkpoint), torch.load(finished(checkpoint))
    found = list(differences(uninterrupted, resumed))
    before, after = stopped["amp"]["skipped_steps"], resumed["amp"]["skipped_steps"]
    cells = [
        recipe.opt_level,
        recipe.optimizer,
        f"{before} + {after - before}",
        f"{resumed['amp']['loss_scaler0']['loss_scale']:.0f}",
        f"{uninterrupted['loss']:.6f}",
        f"{resumed['loss']:.6f}",
        "differs" if found else "equal",
    ]
    return cells, found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    levels = ["O0", "O1", "O2", "O3"]
    add("--opt-level", nargs="+", choices=levels, default=levels, help="the opt levels")
    add("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="the optimizers")
    add("--dtype", choices=HALF_DTYPES, default="fp16", help="the half precision")
    add("--steps", type=int, default=40, help="how many steps a run has")
    add("--stop", type=int, default=17, help="after how many steps to stop")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add(
        "--resume",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="go on from these checkpoints; this script calls itself so",
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.stop <= options.steps:
        parser.error(f"--stop {options.stop} is not between 0 and --steps {options.steps}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each recipe with and without a stop, print how they compare, and return the exit code."""
    options = parse(arguments)
    # The net is so small that several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    # The skips are wanted, and the table counts them.
    logging.getLogger("autoamp").setLevel(logging.ERROR)
    if options.resume:
        resume(options.resume)
        return 0
    recipes = [
        Recipe(level, optimizer, options.dtype, options.device, options.steps)
        for level in dict.fromkeys(options.opt_level)
        for optimizer in dict.fromkeys(options.optimizer)
    ]
    table = Table(title=f"stopped after step {options.stop} of {options.steps}, {options.dtype} on {options.device}")
    for heading in ("level", "optimizer", "skipped", "loss scale", "last loss", "resumed", "all bits"):
        table.add_column(heading)
    different: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*COLUMNS, console=Console(stderr=True), transient=True) as bar,
    ):
        uninterrupted, checkpoints = [], []
        for number, recipe in enumerate(bar.track(recipes, description="training")):
            whole = Run(recipe)
            whole.train(options.steps)
            uninterrupted.append(whole.state_dict())
            part = Run(recipe)
            part.train(options.stop)
            checkpoints.append(Path(folder, f"{number}.checkpoint"))
            torch.save(part.state_dict(), checkpoints[-1])
        subprocess.run([sys.executable, __file__, "--resume", *map(str, checkpoints)], check=True)
        for recipe, state, checkpoint in zip(recipes, uninterrupted, checkpoints, strict=True):
            cells, found = compare(recipe, state, checkpoint)
            table.add_row(*cells)
            different += [f"{recipe.opt_level}, {recipe.optimizer}: {where} differs" for where in found]
    console = Console()
    console.print(table)
    for line in different:
        console.print(line, highlight=False, markup=False)
    console.print(
        "a resumed run differs" if different else "every resumed run agrees bitwise with the one without a stop"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
