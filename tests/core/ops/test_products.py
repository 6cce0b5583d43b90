"""Products: what is shared of their casts, weights that are promised to stay, and torch's own errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import autoamp
from tests.core.modules.watches import Calls

LISTS = {"extends": [], "fp16": ["linear", "__matmul__"]}


@pytest.fixture(autouse=True)
def casts_to_half(half: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=half, lists=LISTS)


def test_errors_are_torch_s_own() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        F.linear(torch.ones(2, 3), Parameter(torch.ones(2, 2)))
    for other in (3, None, [1]):
        with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @"):
            torch.ones(2, 2) @ other  # type: ignore[operator]


def test_query_key_and_value_share_a_cast_of_their_input(half: torch.dtype) -> None:
    layers, saved = [nn.Linear(4, 4) for _ in range(3)], set[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 4):
            saved.add(tensor.data_ptr())
        return tensor

    model, x = Calls(lambda x: [layer(x) for layer in layers]), torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)
    assert len(saved) == 1
    (gradient,) = torch.autograd.grad(sum(output.float().sum() for output in outputs), [x])
    expected = sum(layer.weight.detach().to(half).float().sum(0) for layer in layers).expand(3, 4)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)
