"""The program that is measured: a plain script in fp32, and what each of its options adds to it.

It trains or evaluates one case. On standard output it writes a line of JSON for the first steps, and then one for each
line that it reads: a number of seconds for which it runs steps, or "saved" for the bytes saved for backward.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from tests.benchmarks.models import CASES
from tests.saved import SavedTensors

FIRST_STEPS = 5


def main() -> None:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.program", description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("kind", choices=["training", "evaluation"])
    for option in ("autocast", "compile", "keep-memory", "inference", "apex"):
        parser.add_argument(f"--{option}", action="store_true")
    options = parser.parse_args()
    if options.keep_memory:
        autoamp.keep_freed_memory()
    step, loss_of_batch, model = prepared(options)
    # A promise for all steps, as a server makes it.
    handle: Any = autoamp.current_handle()
    with handle.inference(model) if options.inference else contextlib.nullcontext():
        losses = [float(step()) for _ in range(FIRST_STEPS)]
        answer({"loss": losses[-1]})
        for line in sys.stdin:
            saved = line.strip() == "saved"
            answer({"bytes": saved_bytes(loss_of_batch, model)} if saved else timed(step, float(line)))


def prepared(options: argparse.Namespace) -> tuple[Callable[[], Tensor], Callable[[], Tensor], nn.Module]:
    """Return a step, which gives its loss, what computes the loss alone, and the model."""
    case = CASES[options.case]
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    model, x, y = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaled: Callable[[Tensor], Any] = contextlib.nullcontext
    if options.apex:
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, verbosity=0)
        scaled = lambda loss: amp.scale_loss(loss, optimizer)  # noqa: E731
    if options.kind == "evaluation":
        model.eval()
    called = torch.compile(model) if options.compile else model

    def loss_of_batch() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if options.autocast else contextlib.nullcontext():
            return F.cross_entropy(called(x).flatten(0, -2), y.flatten())

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of_batch()
        with scaled(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.detach()

    return train if options.kind == "training" else torch.no_grad()(loss_of_batch), loss_of_batch, model


def timed(step: Callable[[], Tensor], seconds: float) -> dict[str, float]:
    """Run steps for some seconds after one that is not measured; return the median step and the page faults of one."""
    step()
    times: list[float] = []
    faults = page_faults()
    while sum(times) < seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"seconds": sorted(times)[len(times) // 2], "faults": (page_faults() - faults) / len(times)}


def page_faults() -> int:
    """Return how many pages the system has given to this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def saved_bytes(loss_of_batch: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that a loss saves for its backward pass, each storage once, without the parameters."""
    with SavedTensors(model.parameters()) as saved:
        loss_of_batch()
    return sum(saved.bytes_by_dtype("cpu").values())


def answer(values: dict[str, float]) -> None:
    """Write a line."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
