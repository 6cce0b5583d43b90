"""Norms against an fp64 reference, in all pairs of dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp import normalization as norms
from autoamp.errors import UsageError

SHAPE = (3, 5)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLAIN = [norms.FusedLayerNorm, norms.FusedRMSNorm]
MIXED = [norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm]


def reference(norm: torch.nn.Module, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = copy.deepcopy(norm).double()
    given = value.detach().double().requires_grad_()
    dims = (-2, -1)
    centred = given if isinstance(norm, torch.nn.RMSNorm) else given - given.mean(dims, keepdim=True)
    out = centred / (centred.square().mean(dims, keepdim=True) + norm.eps).sqrt() * wide.weight
    out = out if isinstance(norm, torch.nn.RMSNorm) else out + wide.bias
    out.cos().sum().backward()
    return out, given.grad, wide.weight.grad


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [*PLAIN, *MIXED])
def test_matches_fp64(kind: type, dtype: torch.dtype, active: bool) -> None:
    norm = kind(SHAPE)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    value = (torch.randn(4, *SHAPE) * 3 + 1).to(dtype).requires_grad_()
    expected = reference(norm, value)
    if active:
        autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    out = norm(value)
    assert out.dtype is (torch.float32 if kind in MIXED else dtype)
    out.double().cos().sum().backward()
    for got, want in zip((out, value.grad, norm.weight.grad), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


def test_state_dict_is_that_of_torch() -> None:
    torch.nn.LayerNorm(SHAPE).load_state_dict(norms.FusedLayerNorm(SHAPE).state_dict())
    norms.FusedLayerNorm(SHAPE).load_state_dict(torch.nn.LayerNorm(SHAPE).state_dict())
    norms.FusedRMSNorm(SHAPE).load_state_dict(torch.nn.RMSNorm(SHAPE).state_dict())


def test_without_weights() -> None:
    norm = norms.FusedLayerNorm(5, elementwise_affine=False)
    value = torch.randn(4, 5)
    assert norm.weight is None
    assert norm.bias is None
    assert torch.equal(norm(value), norms.fused_layer_norm(value, 5, 1e-5))


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_needs_weights(kind: type) -> None:
    with pytest.raises(UsageError, match="elementwise_affine=False"):
        kind(5, elementwise_affine=False)


@pytest.mark.parametrize("kind", PLAIN)
def test_whole_numbers_are_refused_and_not_cut_off(kind: type) -> None:
    with pytest.raises(RuntimeError):
        kind(5)(torch.arange(10).view(2, 5))


def test_functional_dtypes() -> None:
    value, weight, bias = torch.randn(4, 5).half(), torch.full((5,), 2.0), torch.ones(5)
    assert norms.fused_layer_norm_affine(value, weight, bias, (5,)).dtype is torch.float16
    assert norms.mixed_dtype_fused_layer_norm_affine(value, weight, bias, (5,)).dtype is torch.float32
    assert norms.fused_rms_norm_affine(value, weight, (5,)).dtype is torch.float16
    mixed = norms.mixed_dtype_fused_rms_norm_affine(value, weight, (5,), 1e-5)
    assert torch.equal(mixed, norms.manual_rms_norm(value, (5,), weight, 1e-5))
    torch.testing.assert_close(mixed, 2.0 * norms.fused_rms_norm(value.float(), 5, 1e-5))


@pytest.mark.parametrize("kind", [*PLAIN, *MIXED])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_autocast_dtype(kind: type, given: torch.dtype, half: torch.dtype) -> None:
    norm = kind(SHAPE)
    value = torch.randn(4, *SHAPE).to(given).requires_grad_()
    with torch.autocast("cpu", dtype=half):
        out = norm(value)
        functional = norms.fused_layer_norm(value, SHAPE)
    # As a cast of the arguments would have it, which leaves fp64 alone.
    expected = half if given is not torch.float64 else norm.weight.dtype if kind in MIXED else given
    assert out.dtype is expected
    assert functional.dtype is (half if given is not torch.float64 else given)
    out.backward(torch.ones_like(out))
    assert value.grad is not None
    assert value.grad.dtype is given
    with torch.autocast("cpu", dtype=half, enabled=False):
        assert norm(value).dtype is (norm.weight.dtype if kind in MIXED else given)


def test_autocast_of_another_device_type_says_nothing(half: torch.dtype) -> None:
    norm = norms.FusedLayerNorm(5, device="meta")
    with torch.autocast("cpu", dtype=half):
        assert norm(torch.randn(2, 5, device="meta")).dtype is torch.float32


def test_a_wrong_shape_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norms.FusedRMSNorm((64, 64))(torch.randn(33, 64, 65).half().requires_grad_())
