"""Recording changes no result, samples the steps that it says, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp.torch_private import dispatch_modes
from tests.tools.report.runs import train


def test_steps_skips_and_samples() -> None:
    handle, _ = train(14, faults=(4, 9))
    recording = handle.record()
    assert recording.steps == 14
    assert [(step, found.kind) for step, _, found in recording.skips] == [
        (4, "half_precision_op"), (9, "half_precision_op"),
    ]  # fmt: skip
    found = handle.report()
    # Steps 0 and 1 were compared with fp32. Step 4 was skipped.
    assert found["samples"] == {"steps": [0, 10], "compared": 2}
    linear = [row for row in found["trace"]["rows"] if row["op"].endswith("linear")]
    # Three layers, in two steps. Input, weight and bias are cast; the input of the last is half already.
    assert sorted((row["calls"], row["casts"] + row["spared"]) for row in linear) == [(2, 4), (2, 6), (2, 6)]
    assert [row["dtypes_out"] for row in linear] == [{"float16": 2}] * 3
    assert {"0.weight", "2.project.bias"} <= {row["parameter"] for row in found["values"]["gradients"]}
    recording.stop()
    assert (recording.active, recording.steps, dispatch_modes()) == (False, 14, 0)


def calls_of_linear(handle: Any) -> int:
    """Return how many calls of linear layers the samples have."""
    return sum(row["calls"] for row in handle.report()["trace"]["rows"] if row["op"].endswith("linear"))


def test_an_evaluation_between_steps_is_no_part_of_a_step() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.record()
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(50):
                model(torch.ones(2, 4))
    assert dispatch_modes() == 0
    assert handle.report()["timeline"]["steps"] == 12
    assert handle.report()["samples"]["steps"] == [0, 10]
    assert calls_of_linear(handle) == 2


@pytest.mark.parametrize(("calls", "expected"), [(50, 1), (6000, 0)])
def test_a_sample_ends_where_no_step_does(calls: int, expected: int) -> None:
    """A program may only evaluate, and with gradients."""
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    numbers = torch.ones(1, 1, dtype=torch.int64)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(calls):
                # A call of a listed function, with no values to look at.
                torch.mm(numbers, numbers)
            return super().forward(x)

    handle.record()
    Model(4, 4)(torch.ones(2, 4))
    assert calls_of_linear(handle) == expected
    assert handle.report()["samples"]["steps"] == [0]


def test_a_mode_of_the_program_ends_as_it_would() -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = handle.record()
    for _ in range(4):
        # It begins outside of our sample or within it, and ends after the step.
        with FlopCounterMode(display=False) as flops:
            model(torch.ones(2, 4)).float().sum().backward()
            optimizer.step()
        assert flops.get_total_flops() > 0
        assert dispatch_modes() == 0 or recording.active
    recording.stop()
    assert dispatch_modes() == 0


class Function(nn.Module):
    """Applies a linear layer, and a function to its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.eye(2).to_sparse() * 2) @ x.float(),
        lambda x: (torch.eye(2).to_sparse_csr() * 2) @ x.float(),
        lambda x: x + (torch.ones(3, device="meta") * 2).dim(),
        lambda x: (torch.nested.as_nested_tensor([x[:1], x], layout=torch.jagged) * 2).values(),
        lambda x: (torch.nested.as_nested_tensor([x[:1], x]) * 2).to_padded_tensor(0.0),
    ],
    ids=["sparse", "csr", "meta", "jagged", "nested"],
)
@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR)")
def test_tensors_whose_elements_cannot_be_read_are_left_out(function: Callable[[Tensor], Tensor]) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = Function(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.record()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = handle.report()
    assert found["samples"]["steps"] == [0]
    assert {row["parameter"] for row in found["values"]["gradients"]} == {"linear.weight", "linear.bias"}


@pytest.mark.usefixtures("one_process")
def test_of_dtensors_the_gradients_of_this_rank_are_counted() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    handle.record()
    F.mse_loss(model(distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])).to_local(), torch.ones(2, 4)).backward()
    optimizer.step()
    (row,) = handle.report()["values"]["gradients"]
    assert (row["parameter"], row["zeros"] + sum(row["exponents"].values())) == ("weight", 16)


def test_a_captured_graph_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Any = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    model = nn.Linear(4, 4)
    handle.record()
    model(torch.ones(2, 4))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(torch.ones(2, 4))
    (row,) = [row for row in handle.report()["values"]["ops"] if row["op"].endswith("addmm")]
    assert row["calls"] == 1
