"""What `ddp.py` and `fsdp2.py` train: a small transformer that continues text, byte by byte.

The text is Python's language reference, as it ships with Python for `help()`.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import Place, process_group
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import autoamp

BYTES = 256
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("steps, loss {task.fields[loss]:.3f}"),
    TimeElapsedColumn(),
)
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Setup = Callable[["Transformer", argparse.Namespace, Place], tuple[nn.Module, torch.optim.Optimizer]]
"""Makes of a model, alike on all processes, the wrapped one, and the optimizer that steps it."""


# -- the text --


def read_text() -> Tensor:
    """Return the language reference as bytes, (N,) uint8."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def draw_batch(text: Tensor, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch, and the byte that follows each: both (size / ranks, length) int64.

    A batch depends on the step alone, so that a resumed run goes on with the next one, on however many ranks.
    """
    starts = torch.randint(len(text) - length, (size,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    part = pieces.chunk(dist.get_world_size())[dist.get_rank()]
    return part[:, :-1], part[:, 1:]


# -- the model --


class Block(nn.Module):
    """Attention to what came before, and two linear layers, each around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, length, width) to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """Bytes (N, length) int64 to logits of the next one (N, length, 256)."""

    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- checkpoints --


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is complete: its metadata is what is written last."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, default=None)


def save(folder: Path, state: autoamp.DistributedState, step: int) -> None:
    """Save a checkpoint, on all ranks together."""
    path = folder / f"step-{step:06}"
    if dist.get_rank() == 0:
        # What a run that was killed may have left of it.
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dcp.save({"training": state, "step": step}, checkpoint_id=path)  # type: ignore[attr-defined]


def resume(folder: Path, state: autoamp.DistributedState) -> int:
    """Load the last checkpoint, if there is one, on all ranks together. Returns how many steps were taken."""
    path = last_checkpoint(folder)
    if path is None:
        return 0
    loaded: dict[str, Any] = {"training": state, "step": 0}
    dcp.load(loaded, checkpoint_id=path)  # type: ignore[attr-defined]
    return int(loaded["step"])


# -- training --


def parse(arguments: Sequence[str] | None, what: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--opt-level", choices=["O0", "O1", "O2"], default="O1", help="the opt level")
    add("--dtype", choices=HALF_DTYPES, default=None, help="the half precision; fp16 on a GPU and bf16 on a CPU")
    add("--steps", type=int, default=60, help="after how many steps to end")
    add("--batch-size", type=int, default=16, help="pieces of text a step, of all processes together")
    add("--length", type=int, default=128, help="bytes of a piece")
    add("--width", type=int, default=128, help="of the transformer")
    add("--depth", type=int, default=4, help="blocks of the transformer")
    add("--lr", type=float, default=2e-3, help="the learning rate")
    add("--checkpoints", type=Path, default=None, help="save to this folder, and go on from what is there")
    add("--every", type=int, default=20, help="save after so many steps, and at the end")
    return parser.parse_args(arguments)


def precision(options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Return what the command line says to `autoamp.initialize`."""
    dtype = HALF_DTYPES.get(options.dtype)
    return {"opt_level": options.opt_level, "dtype": dtype, "device_type": place.device.type, "verbosity": 0}


def run(setup: Setup, what: str, arguments: Sequence[str] | None) -> int:
    """Set up and train on all processes, print on the first what it came to, and return the exit code."""
    options = parse(arguments, what)
    torch.set_num_threads(1)
    with process_group() as place:
        torch.manual_seed(0)
        model = Transformer(options.width, options.depth, heads=4, length=options.length).to(place.device)
        wrapped, optimizer = setup(model, options, place)
        loss = train(options, place, wrapped, optimizer)
        amp = autoamp.state_dict()
        Console(quiet=place.rank != 0, highlight=False, soft_wrap=True).print(
            f"{options.opt_level} on {place.size} x {place.device.type}: loss {loss:.4f} after step {options.steps}, "
            f"loss scale {amp['loss_scaler0']['loss_scale']:g}, skipped {amp['skipped_steps']}"
        )
    return 0


def train(options: argparse.Namespace, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train from the last checkpoint to the end, and return the mean loss of the last ten steps."""
    state = autoamp.DistributedState(model, optimizer)
    done = resume(options.checkpoints, state) if options.checkpoints else 0
    console = Console(stderr=True, quiet=place.rank != 0)
    if done:
        console.print(f"goes on after step {done}")
    text, losses = read_text(), []
    with Progress(*COLUMNS, console=console, disable=place.rank != 0) as bar:
        task = bar.add_task("training", total=options.steps, completed=done, loss=math.nan)
        for step in range(done, options.steps):
            tokens, following = draw_batch(text, step, options.batch_size, options.length)
            logits = model(tokens.to(place.device))
            loss = F.cross_entropy(logits.flatten(0, 1), following.to(place.device).flatten())
            optimizer.zero_grad()
            with autoamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            mean = loss.detach().float()
            dist.all_reduce(mean)
            losses.append(mean / place.size)
            # Asking for the loss waits for the device; the bar is content with that of ten steps ago.
            bar.update(task, advance=1, loss=float(losses[max(0, len(losses) - 10)]))
            if options.checkpoints and ((step + 1) % options.every == 0 or step + 1 == options.steps):
                save(options.checkpoints, state, step + 1)
    return float(torch.stack(losses[-10:]).mean()) if losses else math.nan
