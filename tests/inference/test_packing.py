"""Where oneDNN may be called with packed weights, and where it may not: everything else is computed as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from tests.inference.pinned import HALF, by_hand, check_same, packed_of, packs


@packs
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_packed_weights_cannot_serve_is_computed_otherwise(handle: autoamp.Handle, mode: Any) -> None:
    layer, x = nn.Linear(96, 64), torch.randn(5, 96)
    expected = by_hand(x, layer)
    seen: list[str] = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with mode(), handle.inference(layer):
        layer(x)
        assert packed_of(handle, layer.weight) is not None
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected, rtol=2e-2, atol=2e-2)
        with Looks():
            torch.testing.assert_close(layer(x), expected)
        assert seen
        assert not any("mkldnn::" in name for name in seen)
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x95 and 96x64\)"):
            layer(x[:, 1:])


@packs
def test_forward_mode_derivatives_pass_through(handle: autoamp.Handle) -> None:
    layer, x, tangent = nn.Linear(96, 64), torch.randn(5, 96), torch.randn(5, 96)
    with torch.no_grad(), handle.inference(layer):
        layer(x)
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    assert result.tangent is not None
    expected = torch._C._nn.linear(tangent.to(HALF), layer.weight.detach().to(HALF))
    torch.testing.assert_close(result.tangent.to(HALF), expected, rtol=2e-2, atol=2e-2)


@packs
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_go_to_plain_weights(handle: autoamp.Handle) -> None:
    layer, parts = nn.Linear(96, 64), [torch.randn(2, 96), torch.randn(3, 96)]
    with torch.no_grad(), handle.inference(layer):
        layer(parts[0])
        found = layer(torch.nested.nested_tensor(parts)).unbind()
    for result, part in zip(found, parts, strict=True):
        torch.testing.assert_close(result, by_hand(part, layer), rtol=2e-2, atol=2e-2)


@packs
@pytest.mark.parametrize(
    "rest", [(1, 0, 1, 1), ((1, 1), "same", (1, 1), 1), ([1, 1], [0, 0], [1, 1], 1), ((1,), (0,), (1,), 1), ()], ids=str
)
def test_numbers_of_other_forms(handle: autoamp.Handle, rest: tuple[Any, ...]) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        expected = F.conv2d(x, layer.weight, layer.bias, *rest)
        with handle.inference(layer):
            for _ in range(2):
                check_same(F.conv2d(x, layer.weight, layer.bias, *rest), expected)


@packs
def test_convolutions_that_somebody_looks_at(handle: autoamp.Handle) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        expected = layer(x)
        with handle.inference(layer):
            layer(x)
            check_same(torch.func.vmap(layer)(x[:, None])[:, 0], expected)
            with torch.backends.mkldnn.flags(enabled=False):
                check_same(layer(x), expected)
            with autoamp.disable_casts():
                assert layer(x).dtype is torch.float32


def test_padding_by_name(handle: autoamp.Handle) -> None:
    layer, x = nn.Conv2d(3, 4, 3, stride=2, padding="valid"), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        expected = layer(x)
        with handle.inference(layer):
            for given in (x, x, x.to(HALF)):
                assert torch.equal(layer(given), expected)
            assert packed_of(handle, layer.weight) is None
