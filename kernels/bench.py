"""``python -m kernels.bench``: each kernel beside torch's ways, AdamW over bf16 gradients and weights first.

All ways are timed in turn, many rounds, so that what disturbs the machine disturbs all of them; the table shows medians
and quartiles of the ratio within a round. The share of copy bandwidth counts the bytes that must move: those that the
step reads and writes once, beside what `Tensor.copy_` of a big tensor moves in the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if importlib.util.find_spec("autoamp_kernels") is None:
    # Not installed: as it was built in place.
    sys.path.insert(0, str(Path(__file__).parent))

from kernels.bench_cuda import BYTES, bert_large, on_gpu, on_paper, quartiles

NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}

# Bytes of a parameter that a step in one pass moves.
ONE_PASS = BYTES["adam_"]


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
        self.found, self.scale = torch.zeros(()), torch.ones(())

    def kernel(self) -> None:
        """One pass of autoamp_kernels."""
        import autoamp_kernels

        autoamp_kernels.adam_(self.masters, self.grads, *self.states, **NUMBERS, step=1, halves=self.halves)

    def checked(self) -> None:
        """Inf check, then one pass that unscales and heeds it: what torch.amp's step does."""
        import autoamp_kernels

        self.found.zero_()
        autoamp_kernels.scale_(self.grads, found_inf=self.found)
        autoamp_kernels.adam_(
            self.masters, self.grads, *self.states, **NUMBERS, step=1, halves=self.halves, grad_scale=self.scale,
            found_inf=self.found,
        )  # fmt: skip

    def amp(self) -> None:
        """Torch.amp's whole step: widen, check and unscale, step, narrow."""
        torch._foreach_copy_(self.wide, self.grads)
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(self.wide, self.found, self.scale)
        self.fused()
        torch._foreach_copy_(self.halves, self.masters)

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


class Others:
    """The other kernels, each beside torch's multi-tensor functions where there are such.

    Args:
        step: Whose tensors they read and write.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.norms = [torch.ones(()) for _ in step.masters]
        self.found, self.total = torch.zeros(()), torch.zeros(())
        self.inverse = torch.tensor(0.5)

    def rows(self) -> dict[str, tuple[int, Callable[[], object], Callable[[], object] | None]]:
        """Return by name: the bytes that must move for each element, the kernel, and torch's way or None."""
        import autoamp_kernels as ak

        s = self.step
        rest = {"lr": 1e-3, "halves": s.halves}
        betas = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "step": 1}
        first, second = s.states
        return {
            "sgd_, momentum": (
                20, lambda: ak.sgd_(s.masters, s.grads, first, momentum=0.9, **rest), self.torch_sgd,
            ),
            "adagrad_": (20, lambda: ak.adagrad_(s.masters, s.grads, second, eps=1e-10, **rest), None),
            "lamb_": (40, lambda: ak.lamb_(s.masters, s.grads, first, second, **betas, **rest), None),
            "novograd_": (22, lambda: ak.novograd_(s.masters, s.grads, first, self.norms, **betas, **rest), None),
            "scale_, check and norm": (
                6, lambda: ak.scale_(s.grads, s.wide, inv_scale=0.5, found_inf=self.found, total=self.total),
                self.torch_unscale,
            ),
            "scale_, a copy down": (
                6, lambda: ak.scale_(s.masters, s.halves), lambda: torch._foreach_copy_(s.halves, s.masters),
            ),
            "axpby_, in place": (10, lambda: ak.axpby_(0.5, s.grads, 1.0, s.wide), self.torch_axpby),
        }  # fmt: skip

    def torch_sgd(self) -> None:
        """Widen, torch's fused SGD, narrow."""
        s = self.step
        torch._foreach_copy_(s.wide, s.grads)
        torch._fused_sgd_(
            s.masters, s.wide, s.states[0], weight_decay=0.0, momentum=0.9, lr=1e-3, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip
        torch._foreach_copy_(s.halves, s.masters)

    def torch_unscale(self) -> None:
        """Widen, check and unscale, take norms."""
        s = self.step
        torch._foreach_copy_(s.wide, s.grads)
        torch._amp_foreach_non_finite_check_and_unscale_(s.wide, self.found, self.inverse)
        self.total = torch.stack(list(torch._foreach_norm(s.wide))).norm()

    def torch_axpby(self) -> None:
        """Widen and multiply to new tensors, add."""
        s = self.step
        torch._foreach_add_(s.wide, [grad.float() for grad in s.grads], alpha=0.5)


def say_others(step: Step, count: int, copy: Callable[[], object], rounds: int) -> None:
    """Print a row for each kernel but `adam_`."""
    sys.stdout.write("\nOther kernels: bytes an element; share of copy bandwidth; time over that of torch's way\n")
    for name, (moved, kernel, other) in Others(step).rows().items():
        ways = {"copy_": copy, "kernel": kernel, **({"torch": other} if other else {})}
        seconds = timed(ways, rounds)
        pairs = zip(seconds["kernel"], seconds["copy_"], strict=True)
        share = quartiles([moved * count / one / (8 * count / two) for one, two in pairs])
        ratio = "-"
        if other:
            ratio = quartiles([one / two for one, two in zip(seconds["kernel"], seconds["torch"], strict=True)])
        sys.stdout.write(f"  {name:<26}{moved:>4}  {share}  {ratio}\n")


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


def say_norms(rounds: int) -> None:
    """Print a row for each norm and size: processor time forward and backward, with kernels over without."""
    from autoamp import kernels, normalization

    opened = kernels.opened
    sys.stdout.write(
        "\nNorms, forward and backward: time with kernels over without, as autoamp.normalization calls them\n"
    )
    for kind in (normalization.FusedLayerNorm, normalization.FusedRMSNorm):
        for rows, columns in ((16, 64), (32, 512), (256, 512), (1024, 512), (4096, 1024)):
            for dtype in (torch.float32, torch.bfloat16):
                norm, grad = kind(columns), torch.randn(rows, columns).to(dtype)
                given = torch.randn(rows, columns).to(dtype).requires_grad_()

                def trained(
                    door: Callable[[str], object], norm: Any = norm, given: Any = given, grad: Any = grad
                ) -> None:
                    kernels.opened = door  # type: ignore[assignment]
                    norm(given).backward(grad)

                ways = {"with": lambda run=trained: run(opened), "without": lambda run=trained: run(lambda _: None)}
                seconds = timed(ways, rounds)
                ratio = [one / two for one, two in zip(seconds["with"], seconds["without"], strict=True)]
                name = f"{kind.__name__}, {rows} x {columns}, {str(dtype).removeprefix('torch.')}"
                sys.stdout.write(f"  {name:<44}{quartiles(ratio)}\n")
    kernels.opened = opened


def say_statistics(rounds: int) -> None:
    """Print a row for each shape: `channel_statistics` over two passes of torch's."""
    import autoamp_kernels

    def passes(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
        wide = x.float()
        mean = wide.mean(dims, keepdim=True)
        return mean, (wide - mean).square().mean(dims)

    sys.stdout.write("\nStatistics of channels: time over that of torch's mean and squared deviations\n")
    for shape in ((8, 64, 56, 56), (32, 256, 14, 14), (64, 512, 7, 7), (256, 1024)):
        for dtype in (torch.float32, torch.bfloat16):
            x, dims = torch.randn(shape).to(dtype), [dim for dim in range(len(shape)) if dim != 1]
            ways: dict[str, Callable[[], object]] = {
                "kernel": lambda x=x: autoamp_kernels.channel_statistics(x),  # type: ignore[misc]
                "torch": lambda x=x, dims=dims: passes(x, dims),  # type: ignore[misc]
            }
            seconds = timed(ways, rounds)
            ratio = [one / two for one, two in zip(seconds["kernel"], seconds["torch"], strict=True)]
            sys.stdout.write(f"  {f'{shape}, {dtype}':<44}{quartiles(ratio)}\n")


def say_adam(seconds: dict[str, list[float]], count: int) -> None:
    """Print how `adam_` compares with torch's ways."""
    say = sys.stdout.write
    rates = [8 * count / one for one in seconds["copy_"]]
    say(f"  copy_ bandwidth, GB/s               {quartiles([rate / 1e9 for rate in rates])}\n")
    share = [ONE_PASS * count / one / rate for one, rate in zip(seconds["kernel"], rates, strict=True)]
    say(f"  kernel, share of that               {quartiles(share)}\n")
    for ours, name, label in (
        ("kernel", "fused", "kernel over torch's fused AdamW alone"),
        ("kernel", "whole", "kernel over widen + fused AdamW + narrow"),
        ("kernel", "fresh", "kernel over the same, new tensors"),
        ("checked", "amp", "check + kernel over torch.amp's whole step"),
    ):
        ratio = [one / other for one, other in zip(seconds[ours], seconds[name], strict=True)]
        say(f"  {label:<44}{quartiles(ratio)}\n")


def say_host(tensors: int, calls: int = 400) -> None:
    """Print the least time of a call of `adam_` with nearly nothing to compute."""
    step, other = Step([4] * tensors), Step([4] * tensors)
    given = step.grads, other.grads
    least = {"same gradients": float("inf"), "new ones": float("inf")}
    for turn in range(2 * calls):
        # Each twice.
        step.grads = given[turn // 2 % 2]
        begin = time.perf_counter()
        step.kernel()
        name = "same gradients" if turn % 2 else "new ones"
        least[name] = min(least[name], time.perf_counter() - begin)
    times = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in least.items())
    sys.stdout.write(f"\nThe host's share of a call of adam_ for {tensors} tensors, ms: {times}\n")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--million", type=float, default=12.7, help="millions of parameters")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--norms", action="store_true", help="time norms and statistics alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.norms:
        say_norms(options.rounds)
        say_statistics(options.rounds)
        return
    count = int(options.million * 1e6) // 4 * 4
    step = Step([count // 4] * 4)
    source: Tensor = torch.randn(count)
    target = torch.empty_like(source)
    ways = {
        "copy_": lambda: target.copy_(source), "kernel": step.kernel, "fused": step.fused, "whole": step.whole,
        "fresh": step.fresh, "checked": step.checked, "amp": step.amp,
    }  # fmt: skip
    seconds = timed(ways, options.rounds)
    sys.stdout.write(
        f"{count:,} parameters, {options.threads} thread(s), {options.rounds} rounds; median (quartiles)\n"
    )
    say_adam(seconds, count)
    say_others(step, count, ways["copy_"], options.rounds)
    for tensors in (48, 400):
        say_host(tensors)
    import autoamp_kernels

    if torch.cuda.is_available() and autoamp_kernels.available("cuda"):
        on_gpu(options.rounds, bert_large())
    on_paper()


if __name__ == "__main__":
    main()
