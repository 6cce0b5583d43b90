"""The backward of norms, and statistics of channels, beside their formulas in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import autoamp_kernels
import pytest
import torch
from autoamp_kernels.library import library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Of columns: one, less than a vector, whole vectors, blocks and a rest; on a GPU a warp's row and a block's.
SHAPES = ((1, 1), (3, 5), (40, 64), (700, 33), (5, 2049), (2, 5000))
EPS = 1e-5


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2 + 0.5).to(dtype)


def near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """An error may be that of the largest values: sums lose digits where they cancel."""
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * max(1.0, largest))


def layer_formula(grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean, the inverse deviation, and the gradients of input, weight and bias, in fp64."""
    grad, x = grad.double(), x.double()
    mean = x.mean(1, keepdim=True)
    rstd = 1 / ((x - mean).square().mean(1, keepdim=True) + EPS).sqrt()
    normal = (x - mean) * rstd
    g = grad if weight is None else grad * weight.double()
    of_input = rstd * (g - g.mean(1, keepdim=True) - normal * (g * normal).mean(1, keepdim=True))
    return mean, rstd, of_input, (grad * normal).sum(0), grad.sum(0)


def rms_formula(grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    grad, x = grad.double(), x.double()
    rstd = 1 / (x.square().mean(1, keepdim=True) + EPS).sqrt()
    g = grad if weight is None else grad * weight.double()
    of_input = rstd * (g - x * rstd * (g * x * rstd).mean(1, keepdim=True))
    return rstd, of_input, (grad * x * rstd).sum(0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_the_backward_of_a_layer_norm(
    variant: str, grad_dtype: torch.dtype, dtype: torch.dtype, weighted: bool
) -> None:
    for rows, columns in SHAPES:
        x, grad = values(rows, columns, dtype=dtype), values(rows, columns, dtype=grad_dtype, seed=1)
        weight = values(columns, seed=2) if weighted else None
        mean, rstd, *wanted = layer_formula(grad, x, weight)
        got = autoamp_kernels.layer_norm_backward(grad, x, mean.float(), rstd.float(), weight)
        assert [one.dtype for one in got] == [dtype, torch.float32, torch.float32]
        near(got[0], wanted[0], TOLERANCE[dtype])
        for one, other in zip(got[1:], wanted[1:], strict=True):
            near(one, other, 2e-5)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_the_backward_of_an_rms_norm(variant: str, grad_dtype: torch.dtype, dtype: torch.dtype, weighted: bool) -> None:
    for rows, columns in SHAPES:
        x, grad = values(rows, columns, dtype=dtype), values(rows, columns, dtype=grad_dtype, seed=1)
        weight = values(columns, seed=2) if weighted else None
        rstd, *wanted = rms_formula(grad, x, weight)
        got = autoamp_kernels.rms_norm_backward(grad, x, rstd.float(), weight)
        assert [one.dtype for one in got] == [dtype, torch.float32]
        near(got[0], wanted[0], TOLERANCE[dtype])
        near(got[1], wanted[1], 2e-5)


def test_they_are_torchs() -> None:
    x, grad, weight, bias = values(50, 70), values(50, 70, seed=1), values(70, seed=2), values(70, seed=3)
    _, mean, rstd = torch.native_layer_norm(x, [70], weight, bias, EPS)
    wanted = torch.ops.aten.native_layer_norm_backward(grad, x, [70], mean, rstd, weight, bias, [True] * 3)
    for got, other in zip(autoamp_kernels.layer_norm_backward(grad, x, mean, rstd, weight), wanted, strict=True):
        near(got, other.double(), 1e-5)
    leaf = x.clone().requires_grad_()
    torch.nn.functional.rms_norm(leaf, [70], weight, EPS).backward(grad)
    rstd = torch.rsqrt(x.square().mean(1) + EPS)
    near(autoamp_kernels.rms_norm_backward(grad, x, rstd, weight)[0], leaf.grad.double(), 1e-5)


def test_only_what_is_wanted_is_made() -> None:
    x, grad, weight = values(9, 20), values(9, 20, seed=1), values(20, seed=2)
    mean, rstd = x.mean(1), torch.rsqrt(x.var(1, correction=0))
    whole = autoamp_kernels.layer_norm_backward(grad, x, mean, rstd, weight)
    for wanted in itertools.product((True, False), repeat=3):
        got = autoamp_kernels.layer_norm_backward(grad, x, mean, rstd, weight, wanted=wanted)
        for is_wanted, one, other in zip(wanted, got, whole, strict=True):
            assert (one is not None and torch.equal(one, other)) if is_wanted else one is None


def test_norms_of_nothing() -> None:
    none, weight = torch.empty(0, 4), torch.ones(4)
    got = autoamp_kernels.layer_norm_backward(none, none, torch.empty(0), torch.empty(0), weight)
    assert [one.tolist() for one in got] == [[], [0.0] * 4, [0.0] * 4]
    empty = torch.empty(3, 0)
    assert autoamp_kernels.rms_norm_backward(empty, empty, torch.ones(3))[0].shape == (3, 0)


def test_nan_stays_in_its_row() -> None:
    x, grad = values(4, 50), values(4, 50, seed=1)
    x[2, 7] = float("nan")
    mean, rstd = x.mean(1), torch.rsqrt(x.var(1))
    got = autoamp_kernels.layer_norm_backward(grad, x, mean, rstd)
    assert got[0].isnan().any(1).tolist() == [False, False, True, False]
    assert got[1].isnan().all()
    assert got[2].isfinite().all()


def everything() -> list[Tensor]:
    x, grad, weight = (
        values(300, 700, dtype=torch.bfloat16),
        values(300, 700, dtype=torch.bfloat16, seed=1),
        values(700),
    )
    mean, rstd = x.float().mean(1), torch.rsqrt(x.float().var(1))
    images = values(20, 70, 9, 9, dtype=torch.float16)
    return [
        *autoamp_kernels.layer_norm_backward(grad, x, mean, rstd, weight),
        *autoamp_kernels.rms_norm_backward(grad, x, rstd),
        *autoamp_kernels.channel_statistics(images),
        *autoamp_kernels.channel_statistics(images.to(memory_format=torch.channels_last)),
    ]


def test_threads_and_variants_give_the_same_bits(variant: str) -> None:
    before, results = torch.get_num_threads(), [everything()]
    try:
        torch.set_num_threads(3)
        results.append(everything())
        library().use_cpu_variant("plain")
        results.append(everything())
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


# -- statistics --


def statistics_near(x: Tensor) -> None:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    mean, variance = autoamp_kernels.channel_statistics(x)
    near(mean, x.double().mean(dims), 1e-6)
    torch.testing.assert_close(variance.double(), x.double().var(dims, correction=0), rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [
    (7, 3), (300, 65), (1, 2, 5), (33, 5, 7, 7), (2, 3, 80, 90), (1, 130, 2, 1), (3, 4, 2, 3, 2),
])  # fmt: skip
def test_statistics_of_channels(variant: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = values(*shape, dtype=dtype)
    statistics_near(x)
    if len(shape) == 4:
        statistics_near(x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("shape", [(500, 6), (4, 6, 50, 60)])
def test_a_mean_far_from_zero_costs_no_digits(variant: str, shape: tuple[int, ...]) -> None:
    """The mean of squares less the square of the mean would have none left."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 10000.0
    _, variance = autoamp_kernels.channel_statistics(x)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    torch.testing.assert_close(variance.double(), x.double().var(dims, correction=0), rtol=1e-3, atol=0)


def test_statistics_of_nothing_are_nan() -> None:
    for shape in ((0, 3), (2, 3, 0), (0, 3, 4, 4)):
        assert all(
            one.isnan().all() and one.shape == (3,) for one in autoamp_kernels.channel_statistics(torch.empty(shape))
        )
    assert autoamp_kernels.channel_statistics(torch.empty(4, 0))[0].shape == (0,)


def test_batches_together_are_one_batch(variant: str) -> None:
    batches = [values(size, 5, 3, 3, seed=size) + size for size in (1, 4, 30)] + [torch.empty(0, 5, 3, 3)]
    means, variances = map(torch.stack, zip(*map(autoamp_kernels.channel_statistics, batches), strict=True))
    counts = torch.tensor([float(9 * len(batch)) for batch in batches])
    mean, variance, count = autoamp_kernels.merge_statistics(means, variances, counts)
    whole = torch.cat(batches).double()
    assert count == 9 * 35
    near(mean, whole.mean((0, 2, 3)), 1e-6)
    near(variance, whole.var((0, 2, 3), correction=0), 1e-6)
    none = autoamp_kernels.merge_statistics(means[3:], variances[3:], counts[3:])
    assert none[0].isnan().all()
    assert none[2] == 0
    assert autoamp_kernels.merge_statistics(means[:0], variances[:0], counts[:0])[2] == 0


# -- any shape, any place in memory --


def placed(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy that begins at some element of its memory."""
    return torch.cat([torch.full((offset,), 1e4, dtype=tensor.dtype), tensor.flatten()])[offset:].view(tensor.shape)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 40), columns=st.integers(1, 300), dtype=st.sampled_from(DTYPES),
    offsets=st.tuples(*[st.integers(0, 5)] * 3),
)  # fmt: skip
def test_norms_of_any_shape(rows: int, columns: int, dtype: torch.dtype, offsets: tuple[int, ...]) -> None:
    x, grad = values(rows, columns, dtype=dtype), values(rows, columns, dtype=dtype, seed=1)
    weight = values(columns, seed=2)
    mean, rstd, *wanted = layer_formula(grad, x, weight)
    given_at = [placed(one, offset) for one, offset in zip((grad, x, weight), offsets, strict=True)]
    got = autoamp_kernels.layer_norm_backward(*given_at[:2], mean.float(), rstd.float(), given_at[2])
    near(got[0], wanted[0], 2 * TOLERANCE[dtype])
    near(got[1], wanted[1], 5e-5)
    near(got[2], wanted[2], 5e-5)


@settings(max_examples=25, deadline=None)
@given(
    outer=st.integers(1, 300), channels=st.integers(1, 140), inner=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES), offset=st.integers(0, 5),
)  # fmt: skip
def test_statistics_of_any_shape(outer: int, channels: int, inner: int, dtype: torch.dtype, offset: int) -> None:
    outer = max(1, min(outer, 20000 // (channels * inner)))
    statistics_near(placed(values(outer, channels, inner, dtype=dtype), offset))


# -- what is refused, and torch.compile --


@pytest.mark.parametrize(("changed", "message"), [
    ({"grad": torch.ones(4, 6).t()}, r"grad is not contiguous: shape \(6, 4\); give tensor.contiguous"),
    ({"grad": torch.ones(5)}, r"grad has 5 elements; it must have 24"),
    ({"input": torch.ones(6, 4, dtype=torch.float64)}, r"input has dtype torch.float64; it must be float32 or"),
    ({"rstd": torch.ones(5)}, r"rstd has 5 elements and input 24; give one for each row"),
    ({"mean": torch.ones(6).half()}, r"mean has dtype torch.float16; it must be float32"),
    ({"weight": torch.ones(3)}, r"weight has 3 elements; it must have 4"),
    ({"weight": torch.ones(4, device="meta")}, r"weight is on meta; it must be on cpu"),
])  # fmt: skip
def test_refusals(changed: dict[str, Any], message: str) -> None:
    args = {
        "grad": torch.ones(6, 4), "input": torch.ones(6, 4), "mean": torch.ones(6), "rstd": torch.ones(6), **changed,
    }  # fmt: skip
    with pytest.raises(autoamp_kernels.ArgumentError, match="layer_norm_backward: " + message):
        autoamp_kernels.layer_norm_backward(**args)


def test_refusals_of_statistics() -> None:
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"input has shape \(3,\); it must be \(N, C, \*\)"):
        autoamp_kernels.channel_statistics(torch.ones(3))
    with pytest.raises(autoamp_kernels.ArgumentError, match="input is not contiguous"):
        autoamp_kernels.channel_statistics(torch.ones(3, 4, 8)[:, :, ::2])
    with pytest.raises(
        autoamp_kernels.ArgumentError, match=r"means has shape \(3,\); it must be \(batches, channels\)"
    ):
        autoamp_kernels.merge_statistics(torch.ones(3), torch.ones(3), torch.ones(1))
    with pytest.raises(autoamp_kernels.ArgumentError, match="counts has 3 elements; it must have 2"):
        autoamp_kernels.merge_statistics(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3))


def test_compile_goes_around_them() -> None:
    def ran(x: Tensor, grad: Tensor) -> list[Tensor]:
        rstd = torch.rsqrt(x.square().mean(1))
        means, variances = autoamp_kernels.channel_statistics(x)
        made = autoamp_kernels.merge_statistics(means[None], variances[None], torch.ones(1))
        layer = autoamp_kernels.layer_norm_backward(grad, x, x.mean(1), rstd, wanted=(True, False, True))
        return [*autoamp_kernels.rms_norm_backward(grad, x, rstd), *made, layer[0], layer[2], means + 1]

    x, grad = values(6, 8), values(6, 8, seed=1)
    wanted = ran(x, grad)
    got = torch.compile(ran, fullgraph=True, backend="aot_eager")(x, grad)
    assert all(map(torch.equal, got, wanted))


def test_the_operators_keep_torchs_rules() -> None:
    x, rows = values(6, 8), values(6)
    operators = torch.ops.autoamp_kernels
    for operator, args in (
        (operators.norm_backward, (x, x, None, rows, None, True, True, False)),
        (operators.channel_statistics, (x,)),
        (operators.merge_statistics, (x, x, rows)),
    ):
        torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))
