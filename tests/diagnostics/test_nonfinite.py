"""Steps that are about to write inf or nan, in every mode: each is told, and explained as far as can be."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.diagnostics import NotLocated, kept_calls
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.runtime import current_handle, runtime_of

MODES = ("fp16 dynamic", "fp16 static", "bf16", "fp32", "own GradScaler", "FP16_Optimizer")
FAULTS = ("forward", "backward", "loss", "data", "weight", "explodes")


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)  # fault: backward


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu() + 1
        if self.fault == "forward":
            hidden = torch.log(hidden - hidden.max() - 1)  # fault: forward
        if self.fault == "backward":
            hidden = Reciprocal.apply(hidden)
        out: Tensor = self.last(hidden)
        return out


def lines_of(fault: str) -> list[str]:
    """Return ``file:line`` of a planted fault; none for one in values."""
    texts = Path(__file__).read_text().splitlines()
    return [f"{Path(__file__).name}:{n}" for n, text in enumerate(texts, 1) if text.endswith(f"# fault: {fault}")]


@contextlib.contextmanager
def run(mode: str, fault: str = "", clean: int = 3, faulty: int = 6, **options: Any) -> Iterator[Any]:
    """Train some steps with a fault in the last ones; give the handle, which has the model as ``net``."""
    torch.manual_seed(0)
    net = Net()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    options["device_type"] = "cpu"
    if mode == "fp32":
        autoamp.initialize(net, optimizer, opt_level="O0", verbosity=0, **options)
        handle: Any = current_handle()
    else:
        dtype = torch.bfloat16 if mode == "bf16" else torch.float16
        handle = autoamp.init(dtype=dtype, loss_scale=64.0 if mode == "fp16 static" else None, **options)
    try:
        if mode == "FP16_Optimizer":
            optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        _train(mode, fault, net, optimizer, handle, clean, faulty)
        handle.net = net
        yield handle
    finally:
        handle.deactivate()


def _train(mode: str, fault: str, net: Net, optimizer: Any, handle: Any, clean: int, faulty: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for step in range(clean + faulty):
        x, net.fault = torch.rand(4, 8), fault if step >= clean else ""
        if net.fault == "data":
            x[1, 2] = math.nan
        elif net.fault == "weight":
            net.first.weight.data[0, 1] = 1e38 if mode in ("bf16", "fp32") else 7e4
        elif net.fault == "explodes":
            optimizer.param_groups[0]["lr"] = 1e6
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        if net.fault == "loss":
            loss = torch.log(loss - loss.detach() - 1) / (loss - loss.detach())  # fault: loss
        if mode == "own GradScaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        elif mode == "FP16_Optimizer":
            optimizer.backward(loss)
            optimizer.step()
        else:
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()


def weights(net: Net) -> list[float]:
    return torch.cat([param.detach().flatten() for param in net.parameters()]).tolist()


@pytest.mark.filterwarnings("ignore:.*has inf or nan:UserWarning")
@pytest.mark.parametrize("traced", [False, True], ids=["unasked", "traced"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_each_fault_is_told_and_no_line_is_wrong(mode: str, fault: str, traced: bool) -> None:
    with run(mode, fault, trace_overflow=traced) as handle:
        stats, overflows = handle.stats, handle.overflows
        told = runtime_of(handle).nonfinite.sentences or overflows
    assert stats["nonfinite"] + stats["skipped"] > 0
    assert told
    for one in overflows:
        if isinstance(one.verdict, NotLocated):
            assert one.verdict.why
        elif lines := lines_of(fault):
            assert (one.location or "").rpartition("/")[2] in lines
        elif fault in ("data", "weight"):
            assert {"data": "input x", "weight": "first.weight"}[fault] in str(one) or one.location is not None
    if lines := lines_of(fault):
        # The next step is recorded line by line, if there is one whose weights are finite.
        named = [one.location.rpartition("/")[2] for one in overflows if one.location]
        assert set(named) == set(lines) or stats["skipped"] == 0
    if traced and fault in ("forward", "backward", "data"):
        assert not any(isinstance(one.verdict, NotLocated) for one in overflows)


def test_an_own_scaler_keeps_its_numbers() -> None:
    with run("own GradScaler", "data", clean=2, faulty=5) as handle:
        assert handle.stats["skipped"] == 5
        assert handle.stats["steps"] == 7
        assert handle.stats["loss_scale"] == 65536.0 / 2**5
        assert [one.iteration for one in handle.overflows] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kind", "skipped", "nonfinite"), [("nan loss", 0, 1), ("inf gradient", 1, 0), ("inf gradient, fused", 1, 0)]
)
def test_the_second_of_three_steps_under_an_own_scaler(kind: str, skipped: int, nonfinite: int) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=kind.endswith("fused"))
    scaler = torch.amp.GradScaler("cpu")
    told = []
    for step in range(3):
        size = math.inf if step == 1 and kind != "nan loss" else 1.0
        scaler.scale((weight * size).sum() + (math.nan if step == 1 and kind == "nan loss" else 0.0)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(optimizer)
        told += [str(one.message) for one in caught]
        scaler.update()
        optimizer.zero_grad()
    stats = handle.stats
    assert (stats["steps"], stats["skipped"], stats["nonfinite"]) == (3, skipped, nonfinite)
    assert stats["loss_scale"] == 65536.0 / 2**skipped
    assert any("step 1 of SGD has inf or nan in the loss" in one for one in told) is bool(nonfinite)
    handle.deactivate()


def test_a_loss_of_inf_under_an_own_scaler_is_skipped_or_raises() -> None:
    """The gradients are finite, so the scaler itself takes the step."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(handle: Any, added: float) -> tuple[int, int]:
        optimizer.zero_grad()
        scaler.scale(weight.sum() + added).backward()
        scaler.step(optimizer)
        scaler.update()
        return handle.stats["nonfinite"], handle.stats["skipped"]

    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="step 0 of SGD has inf or nan in the loss, and is skipped"):
        assert step(handle, math.inf) == (1, 1)
    assert handle.last_step_skipped
    assert bool((weight == 1.0).all())
    assert step(handle, 0.0) == (1, 1)
    assert bool((weight < 1.0).all())
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16, on_nonfinite="raise")
    before = weight.detach().clone()
    with pytest.raises(autoamp.NonFiniteGradientsError, match="has inf or nan in the loss"):
        step(handle, math.inf)
    assert torch.equal(weight, before)


def test_a_loss_keeps_no_large_outputs_that_it_is_an_element_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_calls, "_MAX_BYTES", 0)
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    outputs = torch.nn.Linear(4, 1000)(torch.ones(2, 4))
    storage = outputs.untyped_storage()._weak_ref()
    outputs[0, 0].backward()
    del outputs
    expired = torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    assert expired


def test_a_bad_choice_is_told() -> None:
    with pytest.raises(autoamp.UsageError, match="'ignore' is unknown; choose 'warn', 'raise', 'skip'"):
        autoamp.init(device_type="cpu", on_nonfinite="ignore")
