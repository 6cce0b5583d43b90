"""Linear layers, convolutions and products: the results of casts by hand, and weights that are cast once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import autoamp
from tests.ops.by_hand import LISTS, Call, check_by_hand, check_mixtures

CALLS: dict[str, Call] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(3, 4), (5, 4), (5,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(3, 4), (5, 4)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 1, 1), [(2, 3, 8), (4, 3, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, (1, 1), "same"), [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "conv2d, bias None": (lambda x, w: F.conv2d(x, w, None, (2, 2)), [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "conv3d": (lambda x, w: F.conv3d(x, w), [(2, 3, 4, 4, 4), (4, 3, 3, 3, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w), [(2, 3, 4, 4), (3, 4, 3, 3)]),
    "matmul": (lambda x, w: torch.matmul(x, w), [(3, 4), (4, 5)]),
    "Tensor.matmul": (lambda x, w: x.matmul(w), [(3, 4), (4, 5)]),
    "__matmul__": (lambda x, w: x @ w, [(3, 4), (4, 5)]),
    "mm": (lambda x, w: torch.mm(x, w), [(3, 4), (4, 5)]),
    "bmm": (lambda x, w: torch.bmm(x, w), [(2, 3, 4), (2, 4, 5)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w), [(3, 5), (2, 3, 4), (2, 4, 5)]),
}


@pytest.fixture(autouse=True)
def casts_to_half(half: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=half, lists=LISTS)


@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_casts_by_hand(half: torch.dtype, name: str, parameters: bool) -> None:
    check_by_hand(half, CALLS[name], parameters)


@pytest.mark.parametrize("name", CALLS)
def test_some_arguments_in_half_already(half: torch.dtype, name: str) -> None:
    check_mixtures(half, CALLS[name])


def test_an_error_is_torch_s_own() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        F.linear(torch.ones(2, 3), Parameter(torch.ones(2, 2)))


def test_query_key_and_value_share_a_cast_of_their_input(half: torch.dtype) -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 4):
            saved.add(tensor.data_ptr())
        return tensor

    model, x = Projections(), torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)
    assert len(saved) == 1
    (gradient,) = torch.autograd.grad(sum(output.float().sum() for output in outputs), [x])
    expected = sum(layer.weight.detach().to(half).float().sum(0) for layer in model.layers).expand(3, 4)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bias", [True, False])
def test_pinned_weights(half: torch.dtype, bias: bool) -> None:
    handle = autoamp.current_handle()
    assert handle is not None
    layer, x = nn.Linear(4, 4, bias=bias), torch.randn(3, 4)
    expected = layer(x).detach()
    with handle.inference(layer):
        with torch.no_grad():
            for given in (x, x, x.to(half)):
                assert torch.equal(layer(given), expected)
            assert layer(x.double().float()[:, :, None].squeeze(2)).dtype is half
        assert layer(x).requires_grad


@pytest.mark.parametrize("other", [3, None, [1]], ids=str)
def test_an_operand_that_is_no_tensor_is_torch_s_own_error(half: torch.dtype, other: Any) -> None:
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @"):
        torch.ones(2, 2) @ other
