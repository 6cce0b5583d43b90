"""docs/howto/compile.md: torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoamp
from tests.behaviour.training import started

X = torch.rand(4, 8)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[return-value]


@pytest.mark.parametrize("first", ["compile", "init"])
def test_a_compiled_model_casts_like_the_model_itself(first: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    called = compiled(model) if first == "compile" else None
    started()
    out = (called or compiled(model))(X)
    assert out.dtype == model(X).dtype == torch.float32
    assert torch.equal(out, model(X))


def test_an_override_holds_in_compiled_code() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    started().override(model[1], "fp32")
    assert compiled(model)(X).dtype == torch.float32


def test_casts_can_be_turned_off_around_compiled_code() -> None:
    handle, model = started(), compiled(nn.Linear(8, 8))
    assert model(X).dtype == torch.float16
    with handle.disable_casts():
        assert model(X).dtype == torch.float32
    assert model(X).dtype == torch.float16


def test_a_new_loss_scale_does_not_compile_again() -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    handle, model = started(loss_scale=autoamp.DynamicLossScaler(1024.0, growth_interval=1)), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = torch.compile(model, backend=backend)
    for _ in range(3):
        with handle.scale_loss(called(X).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert handle.loss_scale == 2.0**13
    assert len(graphs) == 1


def test_after_deactivate_compiled_code_casts_no_more() -> None:
    handle, model = started(), compiled(nn.Linear(8, 8))
    model(X)
    handle.deactivate()
    assert model(X).dtype == torch.float32
