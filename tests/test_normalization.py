"""Norms against an fp64 reference, in all pairs of dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp import kernels
from autoamp import normalization as norms
from autoamp.errors import UsageError
from tests.kernels.without import WithoutKernels

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


# -- with compiled kernels --


# So many elements that the compiled kernel gains something, and few rows: sums over many would lose digits.
LARGE = (64, 64)
ROWS = 33


BACKEND = kernels.backend("cpu")
needs_kernels = pytest.mark.skipif(not BACKEND.kernels, reason=str(BACKEND))


def trained(norm: torch.nn.Module, value: Tensor) -> tuple[list[Tensor], bool]:
    """Return the result and all gradients, and whether the input was kept as it is for a kernel.

    What torch's functions keep of half input is an fp32 copy.
    """
    given, kept = value.clone().requires_grad_(), []
    norm.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
        out = norm(given)
    out.float().cos().sum().backward()
    is_half = not any(tensor.numel() == given.numel() and tensor.element_size() > 2 for tensor in kept)
    return [out, given.grad, *(param.grad for param in norm.parameters())], is_half


def made(kind: type, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = kind(LARGE).to(dtype)
    for param in norm.parameters():
        torch.nn.init.uniform_(param, 0.5, 2.0)
    return norm


@needs_kernels
@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [norms.FusedRMSNorm, norms.MixedFusedRMSNorm])
def test_kernels_change_nothing_but_rounding(kind: type, dtype: torch.dtype, weights: torch.dtype) -> None:
    norm, value = made(kind, weights), (torch.randn(ROWS, *LARGE) * 3 + 1).to(dtype)
    with_kernels, by_kernel = trained(norm, value)
    assert by_kernel is (dtype is not torch.float32)
    with WithoutKernels():
        expected, by_kernel = trained(norm, value)
    assert not by_kernel
    tolerance = max(TOLERANCE[dtype], TOLERANCE[weights])
    torch.testing.assert_close(with_kernels, expected, rtol=tolerance, atol=tolerance)


@needs_kernels
def test_second_derivatives_are_torchs() -> None:
    def penalised() -> list[Tensor]:
        norm = made(norms.FusedRMSNorm)
        value = torch.randn(ROWS, *LARGE).half().requires_grad_()
        (grad,) = torch.autograd.grad(norm(value).float().cos().sum(), value, create_graph=True)
        grad.float().square().sum().backward()
        return [value.grad, *(param.grad for param in norm.parameters() if param.grad is not None)]

    with_kernels = penalised()
    with WithoutKernels():
        torch.testing.assert_close(with_kernels, penalised(), rtol=1e-2, atol=1e-2)


@needs_kernels
def test_transforms_and_graphs_take_torchs_way() -> None:
    norm, value = made(norms.FusedRMSNorm), torch.randn(2, ROWS, *LARGE).half()

    def loss(given: Tensor) -> Tensor:
        return norm(given).float().cos().sum()

    wanted = torch.autograd.grad(loss(value.requires_grad_()), value)[0]
    mapped = torch.func.vmap(torch.func.grad(loss))(value.detach())
    torch.testing.assert_close(mapped, wanted, rtol=4e-3, atol=4e-3)
    direction = torch.zeros_like(value)
    direction[0, 0, 0, :8] = 1.0
    _, tangent = torch.func.jvp(loss, (value.detach(),), (direction,))
    torch.testing.assert_close(tangent, wanted[0, 0, 0, :8].float().sum(), rtol=2e-2, atol=2e-2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(value.detach().requires_grad_(), torch.ones_like(value))
        assert torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent is not None
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(value)
    torch.testing.assert_close(torch.autograd.grad(compiled, value)[0], wanted, rtol=4e-3, atol=4e-3)


@needs_kernels
@pytest.mark.parametrize(("weights", "rows", "by_kernel"), [
    (torch.float32, ROWS, True), (torch.float32, 1, False), (torch.float64, ROWS, False),
])  # fmt: skip
def test_small_inputs_and_other_dtypes_take_torchs_way(weights: torch.dtype, rows: int, by_kernel: bool) -> None:
    assert trained(made(norms.FusedRMSNorm, weights), torch.randn(rows, *LARGE).half())[1] is by_kernel


def test_a_wrong_shape_is_an_error_with_kernels_too() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        made(norms.FusedRMSNorm)(torch.randn(ROWS, 64, 65).half().requires_grad_())
