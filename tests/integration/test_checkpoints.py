"""Checkpoints: a run that is interrupted and resumed in another process is bitwise the run that was not."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoamp
from autoamp.fp16_utils import convert_network
from tests.states import differences

LISTS = {"extends": [], "fp16": ["linear", "conv2d"], "fp32": ["cross_entropy"]}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
}
KINDS = [("adam", "float16"), ("sgd", "bfloat16")]
SETUPS = ["O0", "O1", "O2", "O3", "FP16_Optimizer"]
# Of those whose gradients overflow: the step before the interruption is one of them, and one comes after it.
OVERFLOWS = (1, 3, 5)
INTERRUPTED, STEPS = 4, 6


def network() -> nn.Sequential:
    torch.manual_seed(7)
    features = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 3))


class Run:
    """A model in training at a level, or by FP16_Optimizer."""

    def __init__(self, setup: str, optimizer: str, half: str, saved: dict[str, Any] | None = None, order: str = "imoa"):
        self.setup = setup
        self.model: Any = network()
        if saved is not None:
            # Weights that are not the checkpoint's.
            nn.init.zeros_(self.model[4].weight)
        dtype: torch.dtype = getattr(torch, half)
        if setup == "FP16_Optimizer":
            self.model = convert_network(self.model, dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        for part in order:
            if part == "i":
                self._initialize(dtype)
            elif saved is not None:
                self._load(part, saved)
        self.step = 0 if saved is None else saved["step"]
        if saved is not None:
            torch.set_rng_state(saved["random"])

    def _initialize(self, dtype: torch.dtype) -> None:
        if self.setup == "FP16_Optimizer":
            arguments = {"init_scale": 2.0**10, "scale_window": 2}
            self.optimizer = autoamp.FP16_Optimizer(
                self.optimizer, dynamic_loss_scale=True, dynamic_loss_args=arguments
            )
        else:
            autoamp.initialize(
                self.model, self.optimizer, opt_level=self.setup, dtype=dtype, device_type="cpu", lists=LISTS,
                loss_scale=autoamp.DynamicLossScaler(2.0**10, growth_interval=2), verbosity=0, num_losses=2,
            )  # fmt: skip

    def _load(self, part: str, saved: dict[str, Any]) -> None:
        if part == "m":
            self.model.load_state_dict(saved["model"], strict=True)
        elif part == "o":
            self.optimizer.load_state_dict(saved["optimizer"])
        elif part == "a" and self.setup != "FP16_Optimizer":
            autoamp.load_state_dict(saved["amp"])

    def train(self, until: int) -> None:
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            inputs = torch.randn(5, 1, 4, 4, generator=generator)
            labels = torch.randint(0, 3, (5,), generator=generator)
            self.optimizer.zero_grad()
            if self.setup == "FP16_Optimizer":
                inputs = inputs.to(self.model[0].weight.dtype)
            loss = cross_entropy(self.model(inputs).float(), labels)
            if self.step in OVERFLOWS:
                loss = loss * torch.inf
            if self.setup == "FP16_Optimizer":
                self.optimizer.backward(loss)
            else:
                with autoamp.scale_loss(loss, self.optimizer, loss_id=self.step % 2) as scaled:
                    scaled.backward()
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        amp = {} if self.setup == "FP16_Optimizer" else autoamp.state_dict()
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "amp": amp}
        return {**own, "step": self.step, "random": torch.get_rng_state()}


def resume_all(folder: Path, threads: int) -> None:
    """Resume every checkpoint of a folder and save what came of it. Run in a process of its own.

    Sums in torch's kernels depend on the number of threads.
    """
    torch.set_num_threads(threads)
    for path in sorted(folder.glob("*.saved")):
        setup, optimizer, half = path.stem.split("-")
        run = Run(setup, optimizer, half, torch.load(path, weights_only=True))
        run.train(STEPS)
        torch.save(run.state(), path.with_suffix(".resumed"))
        end_handle()


def end_handle() -> None:
    """End the handle, if there is one: the next run may have another half dtype."""
    if (handle := autoamp.current_handle()) is not None:
        handle.deactivate()


@pytest.mark.filterwarnings("ignore:.*BatchNorm", "ignore:.*eps=")
def test_resumed_in_a_new_process_is_bitwise_the_same(tmp_path: Path) -> None:
    expected = {}
    for setup, (optimizer, half) in itertools.product(SETUPS, KINDS):
        name = f"{setup}-{optimizer}-{half}"
        run = Run(setup, optimizer, half)
        run.train(INTERRUPTED)
        torch.save(run.state(), tmp_path / f"{name}.saved")
        run.train(STEPS)
        expected[name] = copy.deepcopy(run.state())
        end_handle()
    code = f"import sys; sys.path[:0] = {sys.path!r}; from tests.integration.test_checkpoints import *; "
    code += f"resume_all(Path(sys.argv[1]), {torch.get_num_threads()})"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    got = {name: torch.load(tmp_path / f"{name}.resumed", weights_only=True) for name in expected}
    assert {name: differences(expected[name], got[name]) for name in expected} == {name: [] for name in expected}
    skips = {expected[n]["amp"]["skipped_steps"] for n in expected if "FP16" not in n}
    assert skips == {len(OVERFLOWS)}


# The checkpoint is restored in any order, amp after initialize.
ORDERS = ["".join(order) for order in itertools.permutations("imoa") if order.index("a") > order.index("i")]


# Where nothing is cast, or all of it for good, the order is that of torch.
@pytest.mark.parametrize(("setup", "optimizer", "half"), [
    ("O1", "sgd", "bfloat16"), ("O2", "adam", "float16"), ("FP16_Optimizer", "adam", "float16"),
])  # fmt: skip
def test_restored_in_any_order(setup: str, optimizer: str, half: str) -> None:
    run = Run(setup, optimizer, half)
    run.train(INTERRUPTED)
    saved = copy.deepcopy(run.state())
    run.train(STEPS)
    expected = copy.deepcopy(run.state())
    for order in ORDERS:
        if setup == "FP16_Optimizer" and order.index("o") < order.index("i"):
            # Its state is its own, not that of the optimizer within.
            continue
        other = Run(setup, optimizer, half, copy.deepcopy(saved), order)
        other.train(STEPS)
        assert differences(expected, other.state()) == [], order


def test_a_checkpoint_of_one_level_loads_at_another() -> None:
    run = Run("O2", "sgd", "float16")
    run.train(3)
    saved = copy.deepcopy(run.state())
    other = Run("O1", "sgd", "float16", saved)
    assert differences(saved["model"], other.model.state_dict()) == []
    assert differences(saved["optimizer"]["state"], other.optimizer.state_dict()["state"]) == []
