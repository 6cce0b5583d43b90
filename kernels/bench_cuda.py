"""The O2 step over parameters shaped as BERT-large's: on a GPU beside torch's path, and on paper where there is none.

Torch's path is what `torch.amp` does of the same: gradients are widened, checked and unscaled, the fused AdamW steps,
weights are narrowed again. On paper a row has the bytes that it moves and its launches.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["BYTES", "bert_large", "launches_of_kernel", "launches_of_torch", "on_gpu", "on_paper"]

BETAS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

# Bytes of an element that a pass reads and writes: bf16 gradients and weights, fp32 for the rest; and how many lists of
# tensors it has.
PASSES = {
    "widen": (2 + 4, 2),
    "check and unscale": (4 + 4, 1),
    "check": (2, 1),
    "fused AdamW": (4 + 8 + 8 + 8, 4),
    "narrow": (4 + 2, 2),
    "adam_": (2 + 8 + 8 + 8 + 2, 0),
    "scale_, check": (2, 0),
}
PATHS = {
    "adam_": ("adam_",),
    "torch: widen + fused AdamW + narrow": ("widen", "fused AdamW", "narrow"),
    "scale_ (check) + adam_": ("scale_, check", "adam_"),
    "torch.amp: widen + check and unscale + fused AdamW + narrow": (
        "widen", "check and unscale", "fused AdamW", "narrow",
    ),
}  # fmt: skip
BYTES = {name: sum(PASSES[one][0] for one in passes) for name, passes in PATHS.items()}


def bert_large() -> list[int]:
    """Return the number of elements of each parameter of BERT-large with its heads for pre-training: 398, 336 million.

    Devlin et al. 2019, arXiv:1810.04805: 24 layers, width 1024, 16 heads, a vocabulary of 30,522.
    """
    width, vocabulary = 1024, 30522
    square = [width * width, width]
    layer = [*square * 4, width, width, 4 * width * width, 4 * width, 4 * width * width, width, width, width]
    heads = [*square, width, width, vocabulary, 2 * width, 2]
    return [vocabulary * width, 512 * width, 2 * width, width, width, *layer * 24, *square, *heads]


def launches_of_torch(sizes: Sequence[int], lists: int) -> int:
    """Return how often torch's multi-tensor functions launch for lists of these sizes.

    By ATen/native/cuda/MultiTensorApply.cuh: a launch has up to 320 blocks of 65,536 elements, and as many tensors as
    its table has rows for this number of lists.
    """
    rows = (110, 64, 48, 36, 30)[lists - 1]
    launches = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        left = -(-size // 65536)
        while left:
            taken = min(left, 320 - blocks)
            left, blocks = left - taken, blocks + taken
            if blocks == 320:
                # What is left of a tensor begins the next table.
                launches, blocks, tensors = launches + 1, 0, 1 if left else 0
        if tensors == rows:
            launches, blocks, tensors = launches + (blocks > 0), 0, 0
    return launches + (blocks > 0)


def launches_of_kernel(tensors: int, kernel: str) -> int:
    """Return how often a kernel launches, by the rows of its table: `ak_launch` in cuda_table.h."""
    from autoamp_kernels.abi import AdamArgs, ScaleArgs

    args, columns = {"adam_": (AdamArgs, 7), "scale_, check": (ScaleArgs, 2)}[kernel]
    return -(-tensors // ((32764 - 32 - ctypes.sizeof(args)) // (8 * columns + 12)))


def on_paper() -> None:
    """Print bytes and launches of each path."""
    sizes = bert_large()
    total = sum(sizes)
    sys.stdout.write(
        f"\nOn paper: the O2 step over BERT-large's {len(sizes)} parameters of {total:,} elements, with bf16 weights\n"
        f"  {'path':<60}{'bytes each':>11}{'GB':>7}{'launches':>10}{'of torch':>10}\n"
    )
    # The first two are one pair, the others the other; the second of a pair is torch's.
    names = list(PATHS)
    for place, name in enumerate(names):
        launches = sum(
            launches_of_torch(sizes, PASSES[one][1]) if PASSES[one][1] else launches_of_kernel(len(sizes), one)
            for one in PATHS[name]
        )
        ratio = BYTES[name] / BYTES[names[place | 1]]
        sys.stdout.write(
            f"  {name:<60}{BYTES[name]:>11}{BYTES[name] * total / 1e9:>7.1f}{launches:>10}{ratio:>10.2f}\n"
        )


class Model:
    """Parameters of BERT-large on a GPU, and the ways to step them.

    Args:
        sizes: The number of elements of each.
        device: Where they are.
    """

    def __init__(self, sizes: Sequence[int], device: str = "cuda") -> None:
        def made(dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [torch.full((size,), 0.5, device=device, dtype=dtype) for size in sizes]

        self.masters, self.grads, self.halves = made(), made(torch.bfloat16), made(torch.bfloat16)
        self.states, self.wide = (made(), made()), made()
        self.steps = [torch.ones((), device=device) for _ in sizes]
        self.found, self.scale = torch.zeros((), device=device), torch.ones((), device=device)

    def kernel(self, **options: Any) -> None:
        """`adam_`: one pass."""
        import autoamp_kernels

        autoamp_kernels.adam_(self.masters, self.grads, *self.states, **BETAS, step=1, halves=self.halves, **options)

    def checked(self) -> None:
        """`scale_`, which looks for inf and nan, then `adam_`, which unscales and heeds what was found."""
        import autoamp_kernels

        self.found.zero_()
        autoamp_kernels.scale_(self.grads, found_inf=self.found)
        self.kernel(grad_scale=self.scale, found_inf=self.found)

    def torchs(self, *, check: bool = False) -> None:
        """What torch does of the same."""
        torch._foreach_copy_(self.wide, self.grads)
        if check:
            self.found.zero_()
            torch._amp_foreach_non_finite_check_and_unscale_(self.wide, self.found, self.scale)
        torch._fused_adamw_(
            self.masters, self.wide, *self.states, [], self.steps, lr=BETAS["lr"], beta1=BETAS["beta1"],
            beta2=BETAS["beta2"], weight_decay=BETAS["weight_decay"], eps=BETAS["eps"], amsgrad=False,
            maximize=False, found_inf=self.found if check else None,
        )  # fmt: skip
        torch._foreach_copy_(self.halves, self.masters)


def on_gpu(rounds: int, sizes: Sequence[int], device: str = "cuda") -> None:
    """Print the time of each path on the GPU, as ratios within a round, and its share of copy bandwidth."""
    model, count = Model(sizes, device), sum(sizes)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "copy_": lambda: target.copy_(source), "adam_": model.kernel,
        "torch: widen + fused AdamW + narrow": model.torchs, "scale_ (check) + adam_": model.checked,
        "torch.amp: widen + check and unscale + fused AdamW + narrow": lambda: model.torchs(check=True),
    }  # fmt: skip
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            way()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3)
    sys.stdout.write(
        f"\n{torch.cuda.get_device_name()}, {len(sizes)} parameters of {count:,} elements, {rounds} rounds; median "
        "(quartiles)\n"
    )
    names = list(PATHS)
    for place, name in enumerate(names):
        share = [
            BYTES[name] * count / one / (8 * count / copy)
            for one, copy in zip(seconds[name], seconds["copy_"], strict=True)
        ]
        ratio = [one / other for one, other in zip(seconds[name], seconds[names[place | 1]], strict=True)]
        middle = statistics.median(seconds[name]) * 1e3
        sys.stdout.write(
            f"  {name:<60}{middle:8.2f} ms, of copy bandwidth {quartiles(share)}, of torch's {quartiles(ratio)}\n"
        )


def quartiles(values: list[float]) -> str:
    """Return the median and the quartiles of values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.3f}  ({low:.3f} to {high:.3f})"
