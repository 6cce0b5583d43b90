"""A skipped step leaves parameters, state and groups of each optimizer bitwise as they were, by whatever rule.

Schedulers that follow steps are not called after it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import autoamp
import autoamp.optimizers
from autoamp.core import UnreadFlags, current_handle, runtime_of
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.tools import diagnostics_of
from tests.states import differences

# What makes more state than the defaults do.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}], "FusedSGD": [{"momentum": 0.9}],
    "RMSprop": [{"momentum": 0.9, "centered": True}], "LBFGS": [{"line_search_fn": "strong_wolfe"}],
    "Adam": [{"amsgrad": True}], "FusedAdam": [{"master_weights": True}], "FusedNovoGrad": [{"init_zero": True}],
}  # fmt: skip
FLAGS = ("foreach", "fused", "capturable")
WAYS = ("scale_loss", "scale_loss, flags unread", "auto_scale", "bf16", "bf16 in blocks", "fp32", "GradScaler")


def makers(device: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each optimizer of torch and of autoamp, with options and flags of its own."""
    for library in (torch.optim, autoamp.optimizers):
        for name, kind in vars(library).items():
            # The others there are torch's by names of copies of Apex, and `FP16_Optimizer`, which takes an optimizer.
            if library is autoamp.optimizers and not name.startswith("Fused"):
                continue
            if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
                continue
            takes = inspect.signature(kind).parameters
            for options in ({}, *OPTIONS.get(name, [])):
                for flag in ("", *(flag for flag in FLAGS if flag in takes)):
                    # Torch's own capturable optimizers take no parameters on a CPU.
                    if flag != "capturable" or device != "cpu" or library is autoamp.optimizers:
                        chosen = {"lr": 0.1, **options, **({flag: True} if flag else {})}
                        yield f"{name} {chosen}", functools.partial(kind, **chosen)


def copied(optimizer: Any) -> Any:
    """Return copies of all that a step may change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state = {place: dict(optimizer.state[param]) for place, param in enumerate(params) if param in optimizer.state}
    return copy.deepcopy(([param.detach() for param in params], groups, state))


def train(make: Callable[..., Any], way: str, closure: bool, device: str, sizes: list[float]) -> tuple[list[str], Any]:
    """Train; return what the steps by infinite losses changed or were not seen as, and what all is at the end."""
    handle: Any = current_handle()
    param = Parameter(torch.arange(24.0, device=device).view(6, 4) / 8)
    optimizer = make([param])
    scaler = torch.amp.GradScaler(device, enabled=way == "GradScaler")
    changed, followed = [], []
    stop = handle.follow(lambda: followed.append(1))

    def evaluate(size: float) -> Tensor:
        optimizer.zero_grad()
        indices = torch.arange(6, device=device)
        rows = F.embedding(indices, param, sparse=isinstance(optimizer, torch.optim.SparseAdam))
        loss = (rows.square() - size).square().sum() if math.isfinite(size) else rows.sum() * size
        if way.startswith("scale_loss") or way == "bf16 in blocks":
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            scaler.scale(loss).backward()
        return loss

    for size in sizes:
        before, steps = copied(optimizer), len(followed)
        if closure:
            optimizer.step(functools.partial(evaluate, size))
        else:
            evaluate(size)
            scaler.step(optimizer)
            scaler.update()
        skipped = not math.isfinite(size)
        if skipped:
            changed += differences(before, copied(optimizer))
        if (handle.last_step_skipped, len(followed) - steps) != (skipped, int(not skipped)):
            changed.append(f"{size}: skipped is {handle.last_step_skipped}, {len(followed) - steps} calls of followers")
    stop()
    return changed, copied(optimizer)


def activate(way: str, device: str) -> Any:
    """Return a handle under which steps by infinite losses are skipped."""
    if way == "fp32":
        autoamp.initialize(torch.nn.Linear(1, 1, device=device), opt_level="O0", on_nonfinite="skip", verbosity=0)
        return current_handle()
    if way.startswith("bf16"):
        return autoamp.init(device_type=device, dtype=torch.bfloat16, on_nonfinite="skip")
    handle = autoamp.init(device_type=device, dtype=torch.float16, loss_scale=1024.0)
    if way == "scale_loss, flags unread":
        # As on a GPU: fused optimizers take the flag of an overflow on their device, where nobody explains overflows.
        runtime = runtime_of(handle)
        runtime.optimizers.scalers[0].unread = UnreadFlags((device,))
        runtime.optimizers.listeners.remove(diagnostics_of(handle).overflows)
    if way == "auto_scale":
        handle.auto_scale()
    return handle


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_changes_nothing(way: str, closure: bool, device: str) -> None:
    if way == "GradScaler" and closure:
        return
    handle = activate(way, device)
    found = {}
    for name, make in makers(device):
        if "LBFGS" in name and not closure:
            continue
        bad = [math.inf, 1.0, math.inf, 0.5, 0.25]
        if way == "GradScaler" and getattr(make([Parameter(torch.ones(1, 1))]), "_step_supports_amp_scaling", False):
            # Torch's fused optimizers make their state in a first step that they skip on the device.
            bad = bad[1:]
        changed, end = train(make, way, closure, device, bad)
        later = differences(end, train(make, way, closure, device, [1.0, 0.5, 0.25])[1])
        if changed or later:
            found[name] = changed, later
    assert found == {}
    assert handle.stats["skipped"] > 0


class Sharpness(torch.optim.SGD):
    """Moves the parameters before it evaluates its closure, twice, and keeps notes in its groups and state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["moves"] = group.get("moves", 0) + 1
            group["momentum"] = 0.5
            for param in group["params"]:
                self.state[param].setdefault("seen", []).append(param.clone())
        for _ in range(2):
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(1.0 + group["lr"])
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


LEVELS: dict[str, dict[str, Any]] = {
    "fp32": {"opt_level": "O0"}, "bf16": {"opt_level": "O1"}, "bf16, masters": {"opt_level": "O2"},
    "bf16 parameters": {"opt_level": "O3"}, "fp16, a scale": {"opt_level": "O1", "dtype": torch.float16},
    "fp16, masters, a scale": {"opt_level": "O2", "dtype": torch.float16},
}  # fmt: skip
SEARCHES: dict[str, Callable[..., Any]] = {
    "line search": lambda first, rest: torch.optim.LBFGS([*first, *rest], line_search_fn="strong_wolfe"),
    "fixed steps": lambda first, rest: torch.optim.LBFGS([*first, *rest], lr=0.1, max_iter=4),
    "moves first": lambda first, rest: Sharpness([{"params": first, "lr": 0.25}, {"params": rest, "lr": 0.125}]),
}


class Search:
    """Trains by an optimizer that evaluates its closure several times a step."""

    def __init__(self, level: str, make: Callable[..., Any], action: str = "skip") -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = make(model[0].parameters(), list(model[2].parameters()))
        given = {"dtype": torch.bfloat16, "device_type": "cpu", "verbosity": 0, "on_nonfinite": action, **LEVELS[level]}
        self.model, self.optimizer = autoamp.initialize(model, optimizer, **given)
        self.evaluations, self.spoiled = 0, 0

    def step(self, spoiled: int = 0) -> int:
        """Step, with a loss of nan from one evaluation on if that is given. Returns the number of evaluations."""
        self.evaluations, self.spoiled = 0, spoiled
        self.optimizer.step(self.closure)
        return self.evaluations

    def closure(self) -> Tensor:
        self.evaluations += 1
        self.optimizer.zero_grad()
        loss = self.model(torch.linspace(-1.0, 1.0, 32).view(8, 4)).float().sub(0.5).square().sum()
        loss = loss * (math.nan if 0 < self.spoiled <= self.evaluations else 1.0)
        with autoamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        return loss

    def all(self) -> Any:
        return copied(self.optimizer), copy.deepcopy([param.detach() for param in self.model.parameters()])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_meets_nan_in_its_middle_is_undone(level: str, search: str) -> None:
    undisturbed = Search(level, SEARCHES[search])
    evaluations = undisturbed.step()
    assert evaluations > 1
    # Once the scale fits.
    evaluations = undisturbed.step()
    undisturbed.step()
    expected = undisturbed.all()
    for spoiled in range(1, evaluations + 1):
        program = Search(level, SEARCHES[search])
        program.step(), program.step()
        before = program.all()
        handle: Any = current_handle()
        skipped = handle.stats["skipped"]
        program.step(spoiled)
        assert differences(before, program.all()) == []
        assert (handle.stats["skipped"], handle.last_step_skipped) == (skipped + 1, True)
        program.step()
        assert differences(expected, program.all()) == []


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("level", ["fp32", "bf16, masters"])
def test_where_nan_raises_the_step_is_undone_as_well(level: str, search: str) -> None:
    program = Search(level, SEARCHES[search], "raise")
    program.step()
    before = program.all()
    with pytest.raises(autoamp.NonFiniteGradientsError, match="has inf or nan in"):
        program.step(2)
    assert differences(before, program.all()) == []


def test_the_step_of_an_optimizer_with_hooks_is_not_called_at_all() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="skip")
    param = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    param.grad = torch.full((2,), math.nan)
    with pytest.warns(UserWarning, match="step 0 of SGD has inf or nan in the gradients of .*, and is skipped"):
        optimizer.step()
    assert (called, param.tolist(), handle.last_step_skipped) == ([], [1.0, 1.0], True)
    param.grad = torch.ones(2)
    optimizer.step()
    assert (called, param.tolist(), handle.last_step_skipped) == (["before", "after"], [0.5, 0.5], False)


@pytest.mark.filterwarnings("ignore:.*is skipped:UserWarning")
@pytest.mark.parametrize("static_loss_scale", [1.0, 8.0])
def test_an_fp16_optimizer_skips_the_steps_that_its_scale_does_not_check(static_loss_scale: float) -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="skip")
    param = Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = FP16_Optimizer(torch.optim.SGD([param], lr=0.5), static_loss_scale=static_loss_scale)
    for size in (math.nan, 1.0):
        optimizer.zero_grad()
        optimizer.backward((param * size).sum())
        optimizer.step()
    assert param.tolist() == [0.5, 0.5]
    assert (handle.stats["steps"], handle.stats["skipped"]) == (2, 1)
