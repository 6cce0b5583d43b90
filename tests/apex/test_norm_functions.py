"""What is called by ``apply``, against the same formula in fp64, and as Megatron probes it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from autoamp.apex.normalization import fused_layer_norm as nf

LAYER = [nf.FusedLayerNormAffineFunction, nf.FusedLayerNormAffineMixedDtypesFunction, FastLayerNormFN]
RMS = [nf.FusedRMSNormAffineFunction, nf.FusedRMSNormAffineMixedDtypesFunction]
PLAIN = [nf.FusedLayerNormFunction, nf.FusedRMSNormFunction]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def called(kind: Any, value: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-3, efficient: bool = True) -> Tensor:
    if kind is FastLayerNormFN:
        return kind.apply(value, weight, bias, eps, efficient)
    given = [weight, bias] if kind in LAYER else [weight] if kind in RMS else []
    return kind.apply(value, *given, (5,), eps, efficient)


def by_torch(kind: Any, value: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-3) -> Tensor:
    if kind in RMS or kind is nf.FusedRMSNormFunction:
        return torch.nn.functional.rms_norm(value, (5,), weight if kind in RMS else None, eps)
    return torch.nn.functional.layer_norm(value, (5,), *((weight, bias) if kind in LAYER else (None, None)), eps)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [*LAYER, *RMS, *PLAIN])
def test_against_fp64(kind: Any, dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    mixed = "Mixed" in kind.__name__
    kinds = [((3, 4, 5), dtype), ((5,), torch.float32 if mixed else dtype), ((5,), dtype)]
    tensors = [(torch.randn(shape) * 2).to(d).requires_grad_() for shape, d in kinds]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = called(kind, *tensors)
    assert found.dtype is (torch.float32 if mixed else dtype)
    expected = by_torch(kind, *exact)
    found.double().cos().sum().backward()
    expected.cos().sum().backward()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(tensors, exact, strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=20 * tolerance)


def test_as_megatron_probes_them(apex: Any) -> None:
    from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedRMSNormAffineFunction

    for kind in (FastLayerNormFN, FusedLayerNormAffineFunction, FusedRMSNormAffineFunction):
        assert "memory_efficient" in inspect.getfullargspec(kind.forward).args
    value, weight, bias = torch.randn(2, 5), torch.rand(5), torch.rand(5)
    expected = torch.nn.functional.layer_norm(value, (5,), weight, bias, 1e-5)
    torch.testing.assert_close(FusedLayerNormAffineFunction.apply(value, weight, bias, torch.Size([5]), 1e-5), expected)
    torch.testing.assert_close(FastLayerNormFN.apply(value, weight, bias, 1e-5), expected)
