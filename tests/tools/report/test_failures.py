"""What `--fail-on overflow` counts: each step that was wrong, located or not, and no search for the loss scale."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.core import current_handle
from autoamp.tools import NotLocated, failures

# Whether a mode scales its losses, so that it may search for the scale.
MODES = {
    "auto_scale": True,
    "scale_loss": True,
    "own GradScaler": True,
    "O2": True,
    "fixed scale": False,
    "bf16": False,
}
FAULTS = {
    "log": True,  # located, real
    "numpy": True,  # not located, real
    "large": False,  # located, a search
    "large, unseen": False,  # not located, a search
}


class Net(nn.Module):
    """A model with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.last(x).float()
        if self.fault == "log":
            hidden = torch.log(hidden - hidden.max() - 1.0)
        if self.fault == "numpy":
            hidden = hidden + torch.from_numpy(hidden.detach().numpy() * numpy.float32(numpy.inf))
        if self.fault.startswith("large"):
            hidden = hidden * 3e3
        if self.fault == "large, unseen":
            # A tape does not have lazy conjugates.
            hidden = (torch.view_as_complex(hidden.reshape(-1, 2)).conj() * 1.0).real
        return hidden


def train(mode: str, fault: str, steps: int = 3) -> dict[str, Any]:
    """Return the report of some steps."""
    torch.manual_seed(0)
    net = Net(fault)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.0)
    handle: Any
    if mode == "O2":
        net, optimizer = autoamp.initialize(  # type: ignore[assignment]
            net, optimizer, opt_level="O2", verbosity=0, device_type="cpu", dtype=torch.float16, trace_overflow=True
        )
        handle = current_handle()
    else:
        dtype = torch.bfloat16 if mode == "bf16" else torch.float16
        scale = 128.0 if mode == "fixed scale" else None
        handle = autoamp.init(device_type="cpu", dtype=dtype, loss_scale=scale, trace_overflow=True)
    scaler = torch.amp.GradScaler("cpu")
    with handle.record(), handle.auto_scale() if mode == "auto_scale" else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(2, 4)).sum()
            if mode == "own GradScaler":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                continue
            if mode in ("auto_scale", "bf16"):
                loss.backward()
            else:
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
    found: dict[str, Any] = handle.report()
    found["overflows"] = handle.overflows
    handle.deactivate()
    return found


@pytest.mark.filterwarnings("ignore:.*has inf or nan")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_was_wrong_fails_the_run(mode: str, fault: str) -> None:
    found = train(mode, fault)
    overflows = found["overflows"]
    is_real = FAULTS[fault]
    if is_real or mode != "bf16":
        if not is_real and mode == "fixed scale":
            pytest.skip("128 is low enough")
        assert overflows
        assert all(isinstance(one.verdict, NotLocated) for one in overflows) == (fault in ("numpy", "large, unseen"))
    assert bool(failures(found, "overflow")) == is_real
    assert (found["verdict"]["level"] == "bad") <= is_real


def test_a_fixed_scale_that_is_too_high_fails_a_run_where_no_cause_is_found() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=2.0**16, trace_overflow=True)
    net = Net("large, unseen")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with handle.record():
        for _ in range(2):
            with handle.scale_loss(net(torch.randn(2, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    found = handle.report()
    assert [group["kind"] for group in found["skips"]["groups"]] == ["not_located"]
    assert len(failures(found, "overflow")) == 1
    assert math.isclose(handle.loss_scale, 2.0**16)
