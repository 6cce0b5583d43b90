"""The CUDA kernels on a GPU, beside those of the CPU: `pytest -m gpu tests/kernels`, skipped where there is none.

The same checks run on the emulated device (`pytest -m emulated`), so that they themselves are known to be right. There
a graph is the call itself, and all streams are one.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autoamp_kernels
import pytest
import torch
from torch import Tensor

SIZES = (1, 0, 7, 513, 8192, 8196, 33000)
BETAS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


class Card:
    """A GPU.

    Args:
        device: Where its tensors are.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return what replays a call, after one that was run."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def side_by_side(self, *runs: Callable[[], Any]) -> None:
        """Run each on a stream of its own, and wait for all."""
        torch.cuda.synchronize()
        for run in runs:
            with torch.cuda.stream(torch.cuda.Stream()):
                run()
        torch.cuda.synchronize()


class EmulatedCard(Card):
    """The emulated device, whose memory is the host's."""

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        return run

    def side_by_side(self, *runs: Callable[[], Any]) -> None:
        for run in runs:
            run()


@pytest.fixture(params=[
    pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.emulated),
])  # fmt: skip
def card(request: pytest.FixtureRequest) -> Card:
    # By the CPU's kernels, before an emulated device takes their place.
    reference()
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        return EmulatedCard("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if not autoamp_kernels.available("cuda"):
        pytest.skip("; ".join(door.reason for door in autoamp_kernels.doors() if door.name == "cuda"))
    return Card("cuda")


def tensors(device: str, seed: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> list[Tensor]:
    """Return tensors of all sizes that begin at some element of their memory."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.rand(size + offset, generator=generator).add(0.01).to(dtype) for size in SIZES)
    return [one.to(device)[offset:] for one in made]


def steps(device: str, grad_dtype: torch.dtype, half_dtype: torch.dtype | None, offset: int) -> dict[str, list[Tensor]]:
    """Take two steps by each optimizer; return all that they write."""
    found: dict[str, list[Tensor]] = {}
    for name, options, states in (
        ("adam_", {**BETAS, "weight_decay": 0.1}, 2), ("sgd_", {"momentum": 0.9, "weight_decay": 0.1}, 1),
        ("adagrad_", {"eps": 1e-6}, 1), ("lamb_", {**BETAS, "weight_decay": 0.1}, 2), ("novograd_", BETAS, 1),
    ):  # fmt: skip
        lists = [tensors(device, 0, offset=offset), tensors(device, 1, grad_dtype, offset)]
        lists += [tensors(device, 2 + state) for state in range(states)]
        if name == "novograd_":
            lists.append([torch.ones((), device=device) for _ in SIZES])
        halves = tensors(device, 9, half_dtype, offset) if half_dtype else None
        for step in (1, 2):
            counted: dict[str, Any] = {} if name in ("sgd_", "adagrad_") else {"step": step}
            getattr(autoamp_kernels, name)(*lists, lr=0.1, inv_scale=0.5, halves=halves, **options, **counted)
        found[name] = [*lists[0], *(one for some in lists[2:] for one in some), *(halves or [])]
    return found


def reads(device: str, dtype: torch.dtype, offset: int) -> dict[str, list[Tensor]]:
    """Return what the kernels make that take no step."""
    ins, outs = tensors(device, 0, dtype, offset), tensors(device, 1, offset=offset)
    norms, total, bad = torch.empty(len(SIZES), device=device), torch.empty((), device=device), [ins[3].clone()]
    bad[0][500] = float("inf")
    found = [torch.zeros((), device=device) for _ in range(2)]
    autoamp_kernels.scale_(ins, outs, inv_scale=0.3, norms=norms, total=total, found_inf=found[0])
    autoamp_kernels.scale_(bad, found_inf=found[1])
    sums = tensors(device, 2)
    autoamp_kernels.axpby_(0.3, ins, 0.7, outs, sums)
    made = {"scale_": [*outs, norms, total, *found], "axpby_": sums}
    for rows, columns in ((3, 5), (70, 64), (40, 2050)):
        generator = torch.Generator().manual_seed(rows)
        x, grad = (torch.randn(rows, columns, generator=generator).to(device, dtype) for _ in range(2))
        mean, rstd = x.float().mean(1), torch.rsqrt(x.float().var(1) + 1e-5)
        weight = torch.linspace(0.5, 2.0, columns, device=device)
        made[f"layer norm {columns}"] = list(autoamp_kernels.layer_norm_backward(grad, x, mean, rstd, weight))  # type: ignore[arg-type]
        made[f"RMS norm {columns}"] = list(autoamp_kernels.rms_norm_backward(grad, x, rstd))  # type: ignore[arg-type]
    for shape in ((300, 70), (5, 6, 7, 9), (2, 3, 900)):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 3).to(device, dtype)
        mean, variance = autoamp_kernels.channel_statistics(x)
        counts = torch.tensor([4.0, 2.0], device=device)
        merged = autoamp_kernels.merge_statistics(
            torch.stack([mean, mean + 1]), torch.stack([variance, variance]), counts
        )
        made[f"statistics {shape}"] = [mean, variance, *merged]
    return made


COMBINATIONS = (
    (torch.float32, None, 0), (torch.bfloat16, torch.bfloat16, 0), (torch.float16, torch.float16, 0),
    (torch.bfloat16, torch.float16, 1),
)  # fmt: skip


@functools.cache
def reference() -> dict[Any, dict[str, list[Tensor]]]:
    """Return what the CPU's kernels make; tests that begin on the emulated device have it from before."""
    return {
        (grad, half, offset): {**steps("cpu", grad, half, offset), **reads("cpu", grad, offset)}
        for grad, half, offset in COMBINATIONS
    }


def near(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype is other.dtype
        # One unit in the last place of half precision; sums of fp32 are in another order.
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(one.dtype, 2e-5)
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_kernels_are_those_of_the_cpu(card: Card, combination: tuple[Any, Any, int]) -> None:
    grad, half, offset = combination
    wanted = reference()[combination]
    got = {**steps(card.device, grad, half, offset), **reads(card.device, grad, offset)}
    assert got.keys() == wanted.keys()
    for name, made in got.items():
        near(made, wanted[name])


class Training:
    """Steps whose numbers are all on the device."""

    def __init__(self, device: str) -> None:
        self.params, self.grads = tensors(device, 0), tensors(device, 1, torch.bfloat16)
        self.states = [torch.zeros_like(one) for one in self.params], [torch.zeros_like(one) for one in self.params]
        self.halves = tensors(device, 2, torch.bfloat16)
        self.count, self.rate = torch.zeros((), device=device), torch.full((), 0.1, device=device)
        self.scale, self.found = torch.full((), 4.0, device=device), torch.zeros((), device=device)

    def step(self) -> None:
        """Check, and step unless there is inf or nan."""
        self.found.zero_()
        autoamp_kernels.scale_(self.grads, found_inf=self.found)
        autoamp_kernels.adam_(
            self.params, self.grads, *self.states, **BETAS, lr=self.rate, step=self.count, advance=True,
            grad_scale=self.scale, found_inf=self.found, halves=self.halves,
        )  # fmt: skip

    def written(self) -> list[Tensor]:
        return [*self.params, *self.states[0], *self.states[1], *self.halves, self.count]


def test_an_overflow_is_known_to_the_device_alone(card: Card) -> None:
    training = Training(card.device)
    training.step()
    before = [one.clone() for one in training.written()]
    training.grads[3][100] = float("nan")
    training.step()
    assert training.count == 1
    assert all(map(torch.equal, training.written(), before))
    training.grads[3][100] = 1.0
    training.step()
    assert training.count == 2
    assert not torch.equal(training.params[3], before[3])


def test_a_captured_graph_steps(card: Card) -> None:
    training, eager = Training(card.device), Training(card.device)
    replay = card.captured(training.step)
    # What was captured has not run; the emulated device runs at each call.
    for _ in range(3):
        replay()
    for _ in range(4):
        eager.step()
    near([one.cpu() for one in training.written()], [one.cpu() for one in eager.written()])
    training.grads[5][7], eager.grads[5][7] = float("inf"), float("inf")
    replay()
    assert training.count == 4
    # A rate that a schedule writes is read at the next replay.
    training.grads[5][7] = 1.0
    training.rate.zero_()
    before = [one.clone() for one in training.params]
    replay()
    assert training.count == 5
    assert all(map(torch.equal, training.params, before))


def test_two_streams(card: Card) -> None:
    trainings, eager = [Training(card.device) for _ in range(2)], Training(card.device)
    for _ in range(10):
        card.side_by_side(*(training.step for training in trainings))
        eager.step()
    for training in trainings:
        near([one.cpu() for one in training.written()], [one.cpu() for one in eager.written()])


@pytest.mark.gpu
def test_more_than_31_bits_of_elements() -> None:
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("no GPU with 6 GiB of free memory")
    big = torch.zeros(2**31 + 70_000, dtype=torch.bfloat16, device="cuda")
    big[-1], big[2**31] = 3.0, 4.0
    total = torch.empty((), device="cuda")
    autoamp_kernels.scale_([big], total=total)
    assert total == 5


@pytest.mark.gpu
def test_a_first_call_within_a_capture_is_refused() -> None:
    """Where the kernels are compiled at first use, a capture comes too early."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    program = (
        "import torch, autoamp_kernels as ak\n"
        "from autoamp_kernels.cuda import Packaged\n"
        "Packaged.covers = lambda self, capability: False\n"
        "ins = [torch.ones(3, device='cuda')]\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    try:\n"
        "        ak.scale_(ins, ins, inv_scale=0.5)\n"
        "    except ak.KernelError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "before the capture" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_compute_sanitizer_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None or not torch.cuda.is_available() or "AUTOAMP_TESTS_SANITIZED" in os.environ:
        pytest.skip("no compute-sanitizer, no GPU, or already within")
    for kind in ("memcheck", "racecheck"):
        done = subprocess.run(
            [tool, "--tool", kind, "--error-exitcode", "99", sys.executable, "-m", "pytest", "-n", "0", "-q", "-m",
             "gpu", "-k", "those_of_the_cpu or overflow", str(Path(__file__))],
            env={**os.environ, "AUTOAMP_TESTS_SANITIZED": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
