"""What fp32 costs on a CPU for ops that could stay in bf16: ``python -m tests.benchmarks.kept_in_bf16``.

A step of a transformer of width 512, whose attention has its softmax in Python, is measured with the ops in fp32 and in
bf16 by turns. lists/bf16.toml keeps ops in bf16 where fp32 costs more than 5 % of the step. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

GROUPS = {
    "softmax": ["softmax"],
    "exp, rsqrt, softplus and the like": ["exp", "expm1", "rsqrt", "softplus", "tan"],
    "sum": ["sum"],
    "norms": ["group_norm", "layer_norm", "native_group_norm", "native_layer_norm", "rms_norm"],
}
WIDTH, HEADS = 512, 8


class Block(nn.Module):
    """A block whose attention is written out, with a gate that uses the other ops on each activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.up(self.norm_2(x))
        gate = torch.exp(-F.softplus(y)) / (1 + y.abs().sum(-1, keepdim=True))
        return x + self.down(y * gate)


def turn(ops: list[str], policy: str, model: nn.Module, x: Tensor, steps: int) -> float:
    """Return the seconds of a step with the ops under a policy: the median of some, after one that is not counted."""
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, lists={policy: ops})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    taken = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    handle.deactivate()
    return statistics.median(taken[1:])


def main() -> None:
    """Measure and print, a row for each group of ops."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kept_in_bf16", description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help="pairs of turns; default 20")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn; default 3")
    parser.add_argument("--batch", type=int, default=8, help="sequences; default 8")
    parser.add_argument("--length", type=int, default=256, help="their length; default 256")
    chosen = parser.parse_args()
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(chosen.batch, chosen.length, WIDTH)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| ops | ms with them in bf16 | fp32 / bf16 | middle half |\n|---|---:|---:|---:|")
    for name, ops in GROUPS.items():
        pairs = [
            [turn(ops, policy, model, x, chosen.steps) for policy in ("none", "fp32")] for _ in range(chosen.turns)
        ]
        low, middle, high = statistics.quantiles([wide / half for half, wide in pairs], method="inclusive")
        half = statistics.median(half for half, _ in pairs)
        print(f"| {name} | {half * 1e3:.1f} | {middle:.3f} | {low:.3f}-{high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
