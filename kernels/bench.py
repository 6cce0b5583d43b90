"""``python -m kernels.bench``: an AdamW step over bf16 gradients, fp32 masters and bf16 weights, beside torch's ways.

All ways are timed in turn, many rounds, so that what disturbs the machine disturbs all of them; the table shows medians
and quartiles of the ratio within a round. The share of copy bandwidth counts the bytes that must move: those that the
step reads and writes once, beside what `Tensor.copy_` of a big tensor moves in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}

# Bytes that a step moves for each parameter, and how many launches it takes on CUDA for one list of up to 400 tensors.
# A gradient is bf16: 2 bytes; fp32 values take 4 to read and 4 to write.
PATHS = {
    "one pass": (2 + 8 + 8 + 8 + 2, "1"),
    "torch: widen + fused AdamW + narrow": ((2 + 4) + (4 + 8 + 8 + 8) + (4 + 2), "3 and more, by 30 to 100 tensors"),
    "torch: the same, unscaling first": ((2 + 4) + (4 + 4) + (4 + 8 + 8 + 8) + (4 + 2), "4 and more"),
}


class Step:
    """Parameters of one shape list, and the ways to step them.

    Args:
        sizes: The number of elements of each parameter.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.masters = [torch.randn(size) for size in sizes]
        self.grads = [torch.randn(size).bfloat16() for size in sizes]
        self.halves = [master.bfloat16() for master in self.masters]
        self.states = [torch.zeros(size) for size in sizes], [torch.zeros(size) for size in sizes]
        self.wide = [torch.zeros(size) for size in sizes]
        self.steps = [torch.ones(()) for _ in sizes]

    def kernel(self) -> None:
        """One pass of autoamp_kernels."""
        import autoamp_kernels

        autoamp_kernels.adam_(self.masters, self.grads, *self.states, **NUMBERS, step=1, halves=self.halves)

    def fused(self) -> None:
        """Torch's fused AdamW alone, on fp32 gradients that are there already."""
        torch._fused_adamw_(
            self.masters, self.wide, *self.states, [], self.steps, lr=NUMBERS["lr"], beta1=NUMBERS["beta1"],
            beta2=NUMBERS["beta2"], weight_decay=NUMBERS["weight_decay"], eps=NUMBERS["eps"], amsgrad=False,
            maximize=False,
        )  # fmt: skip

    def whole(self) -> None:
        """Torch's way: widen the gradients, step, narrow the weights."""
        torch._foreach_copy_(self.wide, self.grads)
        self.fused()
        torch._foreach_copy_(self.halves, self.masters)

    def fresh(self) -> None:
        """The same with `Tensor.float`, which makes new tensors in each step."""
        self.wide = [grad.float() for grad in self.grads]
        self.fused()
        torch._foreach_copy_(self.halves, self.masters)


def quartiles(values: list[float]) -> str:
    """Return the median and the quartiles of values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.3f}  ({low:.3f} to {high:.3f})"


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round; within a round each way takes its turn."""
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--million", type=float, default=12.7, help="millions of parameters")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = int(options.million * 1e6)
    step = Step([count // 4] * 4)
    source: Tensor = torch.randn(count)
    target = torch.empty_like(source)
    ways = {
        "copy_": lambda: target.copy_(source), "kernel": step.kernel, "fused": step.fused, "whole": step.whole,
        "fresh": step.fresh,
    }  # fmt: skip
    seconds = timed(ways, options.rounds)
    say = sys.stdout.write
    must, copied = PATHS["one pass"][0] * count, 8 * count
    rates = [copied / one for one in seconds["copy_"]]
    say(f"{count:,} parameters, {options.threads} thread(s), {options.rounds} rounds; median (quartiles)\n")
    say(f"  copy_ bandwidth, GB/s               {quartiles([rate / 1e9 for rate in rates])}\n")
    share = [must / one / rate for one, rate in zip(seconds["kernel"], rates, strict=True)]
    say(f"  kernel, share of that               {quartiles(share)}\n")
    for name, label in (
        ("fused", "torch's fused AdamW alone"), ("whole", "widen + fused AdamW + narrow"),
        ("fresh", "the same, new tensors"),
    ):  # fmt: skip
        ratio = [one / other for one, other in zip(seconds["kernel"], seconds[name], strict=True)]
        say(f"  kernel over {label:<29}{quartiles(ratio)}\n")
    say("\nOn paper, bytes a parameter and launches on CUDA:\n")
    for name, (bytes_moved, launches) in PATHS.items():
        say(f"  {name:<38}{bytes_moved:>4}   {launches}\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
