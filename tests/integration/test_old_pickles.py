"""What programs saved by autoamp 0.1.0 loads: scalers, modules, optimizers, errors and checkpoints."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp

# By name: the class, what `repr` or `loss_scale` told, and `torch.save`'s bytes, compressed and in base64. Made by
# autoamp 0.1.0 of 21 November 2026 on torch 2.13.0.
SAVED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("old_pickles.json").read_text(encoding="utf-8"))
TRAINED = ("O1", "O2", "FP16_Optimizer", "early FP16_Optimizer")


def loaded(name: str) -> Any:
    """Return what was saved under a name."""
    return torch.load(io.BytesIO(zlib.decompress(base64.b64decode(SAVED[name]["data"]))), weights_only=False)


@pytest.mark.parametrize("name", [name for name in SAVED if name not in TRAINED])
def test_a_saved_object_loads_and_is_saved_again(name: str) -> None:
    value = loaded(name)
    assert type(value).__name__ == SAVED[name]["class"]
    told = value.loss_scale if hasattr(value, "loss_scale") else repr(value)
    assert told == SAVED[name]["told"]
    again = io.BytesIO()
    torch.save(value, again)
    again.seek(0)
    assert type(torch.load(again, weights_only=False)) is type(value)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("DynamicLossScaler", "autoamp.core"), ("StaticLossScaler", "autoamp.core"),
        ("fp16_utils.LossScaler", "autoamp.apex.fp16_utils"),
        ("fp16_utils.DynamicLossScaler", "autoamp.apex.fp16_utils"),
        ("network_to_half", "autoamp.apex.fp16_utils"), ("FP16Model", "autoamp.apex.fp16_utils"),
        ("FusedLayerNorm", "autoamp.apex.normalization.fused_layer_norm"),
    ],
)  # fmt: skip
def test_new_pickles_name_public_places(name: str, home: str) -> None:
    value = loaded(name)
    kind = type(value[0] if name == "network_to_half" else value)
    assert f"c{home}\n{kind.__name__}\n".encode() in pickle.dumps(value, protocol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_of_a_level_loads(level: str) -> None:
    saved = loaded(level)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0, loss_scale=128.0
    )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    autoamp.load_state_dict(saved["amp"])
    assert autoamp.state_dict() == saved["amp"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [state["momentum_buffer"].tolist() for state in optimizer.state_dict()["state"].values()] == [
        [[1.0, 1.0], [1.0, 1.0]],
        [1.0, 1.0],
    ]
    for name, weight in saved["model"].items():
        assert model.state_dict()[name].equal(weight)


@pytest.mark.parametrize("name", ["FP16_Optimizer", "early FP16_Optimizer"])
def test_a_checkpoint_of_an_fp16_optimizer_loads(name: str) -> None:
    from autoamp.compat.early.optimizers import FP16_Optimizer as EarlyFP16Optimizer

    saved = loaded(name)
    model = torch.nn.Linear(2, 2).half()
    kind = autoamp.FP16_Optimizer if name == "FP16_Optimizer" else EarlyFP16Optimizer
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=2.0, verbose=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.loss_scale == 128.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    for master, weight in zip(autoamp.master_params(optimizer), saved["model"].values(), strict=True):
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.half(), weight)
