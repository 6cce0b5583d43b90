"""docs/howto/grad_scaler.md: from torch.amp.GradScaler."""

from __future__ import annotations

import pytest
import torch

import autoamp


def used_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(torch.ones(()))
    return scaler


def test_a_scaler_with_settings_takes_the_place_of_a_GradScaler() -> None:
    scaler = autoamp.DynamicLossScaler(init_scale=2.0**10, growth_interval=500, max_loss_scale=None)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=scaler)
    assert handle.loss_scale == 1024.0


def test_the_state_of_a_GradScaler_is_refused_with_the_way_to_load_it() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    state = used_scaler().state_dict()
    with pytest.raises(autoamp.CheckpointError, match=r"docs/howto/grad_scaler\.md") as caught:
        handle.load_state_dict(state)
    assert handle.loss_scale == 65536.0
    # The message has the expression.
    shown = str(caught.value).partition("pass ")[2]
    handle.load_state_dict(eval(shown, {"state": state}))
    assert handle.loss_scale == 4096.0


def test_a_script_with_autocast_and_GradScaler_keeps_its_own_casts_and_scale() -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, scope="modules")
    handle.auto_scale()
    model, scaler = torch.nn.Linear(4, 1), used_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    scaler.scale(out.float().sum()).backward()
    assert model.bias.grad.item() == 2 * 4096.0
    scaler.step(optimizer)
    assert model.bias.grad.item() == 2.0
