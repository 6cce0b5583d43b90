"""Calls of models with gradients off, whose outputs hold inf or nan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.tools import failures
from tests.tools.faults import line_of


class Decoder(nn.Module):
    """Overflows in fp16 in all calls, in none, or for an input that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        out: Tensor = self.last(hidden * hidden * 1e-3)
        return out


class Scores(nn.Module):
    """Returns scores with a mask of -inf, on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, -math.inf)


def decode(
    model: nn.Module, sizes: list[float], off: Callable[[], Any] = torch.no_grad, **options: Any
) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """Return the handle, the report and the outputs of calls with inputs of these sizes."""
    torch.manual_seed(0)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, **{"trace_overflow": True, **options})
    recording = handle.record(sample=False)
    with off():
        outputs = [model(torch.full((2, 4), size)) for size in sizes]
    recording.stop()
    return handle, handle.report(), outputs


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_the_call_after_one_with_inf_or_nan_is_explained(off: Callable[[], Any], caplog: Any) -> None:
    model = Decoder()
    _, found, _ = decode(model, [1.0, 1e3, 1e3, 1e3], off)
    (sentence,) = failures(found, "overflow")
    assert sentence.startswith("3 calls of Decoder with gradients off gave inf or nan: mul in module Decoder at ")
    assert line_of(Decoder, "hidden * hidden") in sentence
    assert 'add fp32 = ["__mul__", "__rmul__"] to the list file (tried)' in sentence
    assert found["verdict"] == {"sentence": sentence, "level": "bad"}
    assert [one["op"] for one in found["remedies"]] == ["__mul__", "__rmul__"]
    assert model.calls == 4
    assert sum("with gradients off" in record.getMessage() for record in caplog.records) == 1


def test_one_call_alone_is_located_and_fails_the_run() -> None:
    _, found, _ = decode(Decoder(), [1e3])
    (sentence,) = failures(found, "overflow")
    assert sentence.startswith("1 call of Decoder with gradients off gave inf or nan: ")
    assert "test_inferences.py:" in sentence


def test_calls_with_finite_outputs_are_told() -> None:
    _, found, _ = decode(Decoder(), [1.0, 2.0])
    assert failures(found, "overflow") == []
    assert found["verdict"]["sentence"] == (
        "2 calls of models with gradients off, whose outputs were all finite; no step of an optimizer was seen"
    )


def test_scores_that_are_inf_on_purpose_are_no_fault() -> None:
    _, found, _ = decode(Scores(), [1.0, 1.0, 1.0])
    assert failures(found, "overflow") == []


def test_data_with_nan_is_named() -> None:
    _, found, _ = decode(Decoder(), [math.nan, math.nan])
    assert "the input x of Decoder holds nan" in failures(found, "overflow")[0]


def test_outputs_are_bitwise_the_same_and_nothing_is_looked_at_unasked() -> None:
    handle, found, plain = decode(Decoder(), [1.0, 1e3, 1e3], trace_overflow=False)
    assert (failures(found, "overflow"), found["inferences"]["calls"]) == ([], 0)
    handle.deactivate()
    _, _, looked = decode(Decoder(), [1.0, 1e3, 1e3])
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(plain, looked, strict=True))


def test_compiled_models_are_left_alone() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, trace_overflow=True)
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    compiled = torch.compile(nn.Linear(4, 4), backend=backend, fullgraph=True)
    with torch.no_grad(), handle.record(sample=False), contextlib.nullcontext():
        for _ in range(3):
            compiled(torch.full((2, 4), 1e6))
    assert len(runs) == 3
    torch._dynamo.reset()


def test_an_evaluation_between_steps_is_counted() -> None:
    torch.manual_seed(0)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=True)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with handle.record(sample=False):
        for _ in range(2):
            with torch.no_grad():
                model(torch.full((2, 4), 1e3))
            with handle.scale_loss(model(torch.ones(2, 4)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    found = handle.report()
    assert handle.skipped_steps == 0
    assert found["inferences"]["nonfinite"] == 2
    assert found["verdict"]["sentence"].endswith("0 of 2 steps skipped; no forward overflow; the loss scale is fixed")
    assert found["verdict"]["level"] == "bad"
