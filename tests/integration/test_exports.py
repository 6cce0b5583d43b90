"""Graphs that a program makes of its model: under each option that looks at ops, before and after calls and steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

HALF = torch.float16


class Net(nn.Module):
    """An fp32 op stands before a half one, and an activation is cast twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return torch.softmax(self.last(y) @ self.first(y).t(), -1)


def traced(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(model, x)  # type: ignore[no-any-return]


def exported(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (x,)).module()


EXPORTS = {"jit.trace": traced, "export": exported}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "no cache": {"enable_caching": False}, "trace_overflow": {"trace_overflow": True}, "record": {},
    "modules": {"scope": "modules"},
}  # fmt: skip


@pytest.fixture
def restored() -> Iterator[None]:
    """End the handle of a test, and silence torch's advice to use other exports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    handle = autoamp.current_handle()
    if handle is not None:
        handle.deactivate()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_model_is_exported_before_and_after_calls_and_steps(export: str, option: str) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=HALF, **OPTIONS[option])
    recording = handle.record() if option == "record" else None
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        with handle.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for before in (lambda: None, lambda: model(x), train, model.eval):
        before()
        graph = EXPORTS[export](model, x)
        torch.testing.assert_close(graph(x).float(), model(x).float(), rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(EXPORTS[export](model, x)(x).float(), model(x).float(), rtol=1e-3, atol=1e-3)
    train()
    if recording is not None:
        recording.stop()
    assert handle.stats["steps"] == 2


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("option", OPTIONS)
def test_a_function_is_traced_after_the_call_of_a_model(option: str) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=HALF, **OPTIONS[option])
    if option == "record":
        handle.record()
    nn.Linear(4, 4)(torch.ones(2, 4))
    double = torch.jit.trace(lambda a: a * 2, torch.ones(2))
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with handle.trace():
        assert torch.jit.trace(lambda a: a * 2, torch.ones(2))(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("export", EXPORTS)
def test_by_module_the_log_says_once_that_a_graph_has_half_nodes(export: str, caplog: pytest.LogCaptureFixture) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16, scope="modules")
    model, x = Net(), torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        with handle.disable_casts():
            exact = EXPORTS[export](model, x)
        assert not caplog.records
        for _ in range(2):
            EXPORTS[export](model, x)
    (record,) = caplog.records
    assert record.getMessage().startswith("the graph of Net has bfloat16 nodes")
    assert "autoamp.current_handle().disable_casts()" in record.getMessage()
    handle.deactivate()
    torch.testing.assert_close(exact(x), model(x))


@pytest.mark.usefixtures("restored")
def test_a_program_that_asked_for_casts_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        traced(Net(), torch.randn(4, 8))
    assert not caplog.records
