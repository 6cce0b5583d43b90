"""Gradients of O1 and O2 against an fp64 reference: no worse than those of torch.amp on the same model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoamp

SCALE = 512.0
SEEDS = 2


def convnet() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, torch.randn(32, 1, 8, 8)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(16, 32), encoder, nn.Flatten(), nn.Linear(12 * 32, 10)), torch.randn(16, 12, 16)


def vector(params: Iterable[Any]) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in params]).cpu()


def plain(model: nn.Module, inputs: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    cross_entropy(model(inputs), labels).backward()
    return vector(model.parameters())


def torch_amp(model: nn.Module, inputs: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=dtype):
        loss = cross_entropy(model(inputs), labels)
    (loss * SCALE).backward()
    return vector(model.parameters()) / SCALE


def at(level: str) -> Callable[..., Tensor]:
    def run(model: nn.Module, inputs: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autoamp.initialize(
                model, optimizer, opt_level=level, dtype=dtype, device_type=inputs.device.type, loss_scale=SCALE,
                verbosity=0,
            )  # fmt: skip
        with autoamp.scale_loss(cross_entropy(model(inputs), labels), optimizer) as scaled:
            scaled.backward()
        return vector(autoamp.master_params(optimizer))

    return run


WAYS: dict[str, Callable[..., Tensor]] = {
    "fp32": plain, "torch.amp": torch_amp, "O1": at("O1"), "O2": at("O2"), "O3": at("O3"),
}  # fmt: skip


@pytest.mark.parametrize("make", [convnet, transformer])
def test_no_worse_than_torch_amp(make: Any, half: torch.dtype, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Relative errors ``|g - g64| / |g64|`` over all parameters, mean of the seeds, in a table."""
    errors = dict.fromkeys(WAYS, 0.0)
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, inputs = make()
        model, inputs = model.to(device), inputs.to(device)
        labels = torch.randint(0, 10, (len(inputs),), device=device)
        exact = plain(copy.deepcopy(model).double(), inputs.double(), labels, half)
        for name, run in WAYS.items():
            got = run(copy.deepcopy(model), inputs, labels, half)
            errors[name] += ((got - exact).norm() / exact.norm()).item() / SEEDS
            if (handle := autoamp.current_handle()) is not None:
                handle.deactivate()
    with capsys.disabled():
        row = "  ".join(f"{name} {error:.2e}" for name, error in errors.items())
        print(f"\n{make.__name__:12} {str(half).removeprefix('torch.'):9} {device:5} {row}", end=" ")
    # A level that cast nothing would be as good as fp32, and prove nothing.
    assert errors["fp32"] < 1e-5 < errors["O1"]
    assert errors["O1"] <= 1.1 * errors["torch.amp"] + 1e-6
    assert errors["O2"] <= 1.1 * errors["torch.amp"] + 1e-6
    assert errors["O3"] < 0.1
